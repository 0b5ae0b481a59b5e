//! Parts as threads of one process: what their plans ask each other for, they exchange in memory.

use std::sync::{Barrier, Mutex};

use paceline_nn::part::{PartForm, StagePieces};
use paceline_nn::{Input, Mode, Model, StageNetwork};
use paceline_system::random::Random;
use paceline_tensor::device::cuda::CudaError;
use paceline_tensor::execute::Turn;
use paceline_tensor::op::piece_range;
use paceline_tensor::part::traffic;
use paceline_tensor::{Device, Executor, Pass, Plan, Store};

/// What is trained, and how long.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub size: usize,
    pub channels: usize,
    pub classes: usize,
    pub batch: usize,
    pub steps: u64,
}

impl Setting {
    pub fn input(&self) -> Input {
        Input::Image { size: [self.size; 2], channels: self.channels }
    }
}

/// Learning rate.
const RATE: f32 = 1e-3;

/// Where parts exchange numbers.
pub struct Meeting {
    barrier: Barrier,
    brought: Mutex<Vec<Vec<f32>>>,
}

impl Meeting {
    pub fn new(parts: usize) -> Self {
        Self { barrier: Barrier::new(parts), brought: Mutex::new(vec![Vec::new(); parts]) }
    }

    /// What all parts bring, in order.
    fn all(&self, own: usize, numbers: &[f32]) -> Vec<Vec<f32>> {
        self.brought.lock().unwrap()[own] = numbers.to_vec();
        self.barrier.wait();
        let all = self.brought.lock().unwrap().clone();
        self.barrier.wait();
        all
    }

    /// Answers a part.
    pub fn answer(&self, own: usize, turn: Turn<'_>) {
        match turn {
            Turn::SumParts { numbers } => {
                let all = self.all(own, numbers);
                assert!(all.iter().all(|one| one.len() == numbers.len()), "a sum of as many numbers in every part");
                numbers.fill(0.0);
                all.iter().for_each(|one| numbers.iter_mut().zip(one).for_each(|(sum, x)| *sum += x));
            }
            Turn::GatherParts { numbers, lengths, own: number } => {
                assert_eq!(number, own);
                let all = self.all(own, &numbers[piece_range(lengths, own)]);
                for (part, one) in all.iter().enumerate() {
                    numbers[piece_range(lengths, part)].copy_from_slice(one);
                }
            }
            _ => {}
        }
    }
}

/// What a part has in the end.
pub struct Trained {
    pub losses: Vec<f32>,
    /// Weights, gradients of the first step, and states, by name.
    pub tensors: Vec<(String, Vec<f32>)>,
    pieces: Option<StagePieces>,
}

/// A tensor of the whole model, and what a part should have of it.
pub struct Expected {
    pub whole: Vec<f32>,
    pub own: Vec<f32>,
}

impl Trained {
    /// What a part should have, as this has the whole.
    pub fn tensors_of(&self, part: &Self) -> Vec<(String, Expected)> {
        let StagePieces { parameters, states } = part.pieces.as_ref().expect("a part has pieces");
        let count = self.tensors.iter().filter(|(name, _)| name.starts_with("weight of ")).count();
        let numbered = [(0, parameters), (count, parameters), (2 * count, states)];
        let of = |(first, pieces): (usize, &Vec<paceline_tensor::part::PartTensor>)| {
            let expected = pieces.iter().map(|piece| {
                let (name, whole) = self.tensors[first + piece.whole].clone();
                let mut own = vec![0.0; piece.piece.elements(whole.len())];
                piece.piece.take(&whole, &mut own);
                (name, Expected { whole, own })
            });
            expected.collect::<Vec<_>>()
        };
        numbered.into_iter().flat_map(of).collect()
    }
}

pub fn train_whole(model: &dyn Model, setting: &Setting) -> Trained {
    let Setting { batch, classes, .. } = *setting;
    let mut stages = StageNetwork::all(model, Mode::Train, batch, (setting.input(), classes, 0.1), &[]).unwrap();
    train(stages.remove(0), setting, None, &mut |_| {})
}

/// The same from weights whose last bits are others: how far rounding alone leads.
pub fn train_nudged(model: &dyn Model, setting: &Setting, nudge: u64) -> Trained {
    let Setting { batch, classes, .. } = *setting;
    let mut stages = StageNetwork::all(model, Mode::Train, batch, (setting.input(), classes, 0.1), &[]).unwrap();
    train(stages.remove(0), setting, Some(nudge), &mut |_| {})
}

pub fn train_parts(model: &(dyn Model + Sync), setting: &Setting, form: &PartForm) -> Vec<Trained> {
    in_parts((model, Mode::Train), setting, form, &|network, answer| train(network, setting, None, answer))
}

/// The answers to the first batch of a model that is evaluated.
pub fn answers_whole(model: &dyn Model, setting: &Setting) -> Vec<f32> {
    let Setting { batch, classes, .. } = *setting;
    let mut stages = StageNetwork::all(model, Mode::Eval, batch, (setting.input(), classes, 0.0), &[]).unwrap();
    answers(stages.remove(0), setting, &mut |_| {})
}

pub fn answers_parts(model: &(dyn Model + Sync), setting: &Setting, form: &PartForm) -> Vec<Vec<f32>> {
    in_parts((model, Mode::Eval), setting, form, &|network, answer| answers(network, setting, answer))
}

/// What a part's plan asks for goes to this.
type Answer<'a> = dyn FnMut(Turn<'_>) + 'a;

/// Has every part do something, each on a thread.
fn in_parts<T: Send>(
    (model, mode): (&(dyn Model + Sync), Mode),
    setting: &Setting,
    form: &PartForm,
    each: &(dyn Fn(StageNetwork, &mut Answer<'_>) -> T + Sync),
) -> Vec<T> {
    let Setting { batch, classes, .. } = *setting;
    let smoothing = if mode == Mode::Train { 0.1 } else { 0.0 };
    let part = |own| {
        let form = PartForm { own, ..form.clone() };
        StageNetwork::part(model, mode, batch, (setting.input(), classes, smoothing), &form).unwrap()
    };
    let networks: Vec<StageNetwork> = (0..form.parts).map(part).collect();
    let asked: Vec<_> = networks.iter().map(|network| traffic(&network.graph).exchanges).collect();
    let kinds = |own: usize| asked[own].iter().map(|one| (one.kind, one.bytes)).collect::<Vec<_>>();
    assert!((1..form.parts).all(|own| kinds(own) == kinds(0)), "all parts meet as often, for the same");
    let meeting = Meeting::new(form.parts);
    std::thread::scope(|scope| {
        let run = |(own, network): (usize, StageNetwork)| {
            let meeting = &meeting;
            scope.spawn(move || each(network, &mut |turn| meeting.answer(own, turn)))
        };
        let threads: Vec<_> = networks.into_iter().enumerate().map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The images and right classes of a step.
fn batch(setting: &Setting, step: u64) -> (Vec<f32>, Vec<i32>) {
    let mut random = Random::new(&[3, step]);
    let each = setting.size * setting.size * setting.channels;
    let images = (0..setting.batch * each).map(|_| random.normal()).collect();
    (images, (0..setting.batch).map(|_| random.below(setting.classes) as i32).collect())
}

fn answers(network: StageNetwork, setting: &Setting, answer: &mut Answer<'_>) -> Vec<f32> {
    let plan = Plan::new(network.graph.clone(), &network.wanted(1 << 20));
    let mut store = Store::new(&plan);
    fill(&network, &mut store);
    // With first statistics, what comes through many layers is so small that it would vanish beside a bias.
    let last = network.parameters.len() - 1;
    assert!(network.parameters[last].name.ends_with("bias"), "a classifier ends with its bias");
    store.parameter_mut(last).fill(0.0);
    let mut executor = Executor::new(&Device::cpu(1), plan).unwrap();
    let (head, (images, targets)) = (network.head.unwrap(), batch(setting, 0));
    executor.poison().unwrap();
    executor.write(network.x.unwrap(), &images).unwrap();
    executor.write(head.targets, &targets).unwrap();
    forward(&mut executor, &mut store, Pass::default(), answer);
    executor.read(head.logits).unwrap()
}

fn forward(executor: &mut Executor, store: &mut Store, pass: Pass, answer: &mut Answer<'_>) {
    let mut turn = |turn: Turn<'_>| {
        answer(turn);
        Ok::<(), CudaError>(())
    };
    executor.forward_with(store, pass, &mut turn).unwrap();
}

/// Steps of SGD with momentum.
fn train(network: StageNetwork, setting: &Setting, nudge: Option<u64>, answer: &mut Answer<'_>) -> Trained {
    let plan = Plan::new(network.graph.clone(), &network.wanted(1 << 20));
    let mut store = Store::new(&plan);
    fill(&network, &mut store);
    if let Some(nudge) = nudge {
        let mut random = Random::new(&[9, nudge]);
        store.parameters.iter_mut().for_each(|x| *x *= [1.0 - f32::EPSILON, 1.0, 1.0 + f32::EPSILON][random.below(3)]);
    }
    let mut executor = Executor::new(&Device::cpu(1), plan).unwrap();
    let (head, seed) = (network.head.unwrap(), network.gradients.as_ref().unwrap().seed.unwrap());
    let mut velocity = vec![0.0f32; store.parameters.len()];
    let (mut losses, mut first) = (Vec::new(), Vec::new());
    for step in 0..setting.steps {
        let (images, targets) = batch(setting, step);
        executor.poison().unwrap();
        executor.write(network.x.unwrap(), &images).unwrap();
        executor.write(head.targets, &targets).unwrap();
        executor.write(seed, &[1.0f32]).unwrap();
        let pass = Pass { seed: 7, step, first_sample: 0, samples: setting.batch };
        forward(&mut executor, &mut store, pass, answer);
        losses.push(executor.read::<f32>(head.loss).unwrap()[0]);
        executor
            .backward(&mut store, pass, &mut |turn| {
                answer(turn);
                true
            })
            .unwrap();
        if step == 0 {
            first = (0..network.parameters.len()).map(|index| store.gradient(index).to_vec()).collect();
        }
        let gradients = store.gradients.to_vec();
        for ((weight, velocity), gradient) in store.parameters.iter_mut().zip(&mut velocity).zip(gradients) {
            *velocity = 0.9 * *velocity + gradient;
            *weight -= RATE * *velocity;
        }
    }
    let names = |kind: &str| network.parameters.iter().map(|one| format!("{kind} of {}", one.name)).collect::<Vec<_>>();
    let weights = (0..network.parameters.len()).map(|index| store.parameter(index).to_vec());
    let mut tensors: Vec<(String, Vec<f32>)> = names("weight").into_iter().zip(weights).collect();
    tensors.extend(names("gradient").into_iter().zip(first));
    for (index, state) in network.states.iter().enumerate() {
        tensors.push((state.name.clone(), store.states[store.states_layout().range(index)].to_vec()));
    }
    Trained { losses, tensors, pieces: network.pieces }
}

/// A model's first weights: a part has what it should of the whole ones.
fn fill(network: &StageNetwork, store: &mut Store) {
    for (index, parameter) in network.parameters.iter().enumerate() {
        let mut whole = vec![0.0; parameter.shape.elements()];
        parameter.init.fill(5, &parameter.name, &parameter.shape, &mut whole);
        match &network.pieces {
            Some(pieces) => pieces.parameters[index].piece.take(&whole, store.parameter_mut(index)),
            None => store.parameter_mut(index).copy_from_slice(&whole),
        }
    }
    for (index, state) in network.states.iter().enumerate() {
        let range = store.states_layout().range(index);
        store.states[range].fill(state.start);
    }
}
