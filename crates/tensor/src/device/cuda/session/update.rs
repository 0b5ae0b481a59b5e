//! What follows the gradients: are they numbers, how long are they, and the optimizer's step, one kernel over all parameters.
//!
//! LARS gives every parameter that decays a rate of its own. Squares of weights and gradients are summed in f64, by pieces of fixed size
//! and then over the pieces of each parameter, in the same order every time: two launches and one more pass over weights and gradients.

use std::ops::Range;

use super::{GraphCompiler, StepNumbers};
use crate::device::cpu::update::Update;
use crate::device::cuda::bound::{PASS_BYTES, pass_bytes};
use crate::device::cuda::driver::Memory;
use crate::device::cuda::program::{Address, Argument, BLOCK, Builder, Program};
use crate::device::cuda::{Cuda, CudaError};
use crate::plan::Plan;

/// Bytes of [`StepNumbers`] on the device: the pass, norm, rows, two rules of a kind and nine numbers.
pub(super) const NUMBERS_BYTES: usize = PASS_BYTES + 8 + 2 * 40;
/// Where the number of rows stands in them.
pub(super) const ROWS_AT: u64 = PASS_BYTES as u64 + 4;
/// Elements whose squares a block sums, as a task of the CPU does.
const PIECE: usize = 16 * 1024;

/// Which parameter decays, and by which rate it moves.
#[derive(Debug)]
pub(super) struct Layers {
    /// For every 16 elements, the number of their layer: parameters that decay count from 1, the others have 0.
    marks: Memory,
    rates: Option<Rates>,
}

/// What LARS needs.
#[derive(Debug)]
struct Rates {
    coefficient: f32,
    /// Where each piece begins and ends, as 64-bit words.
    pieces: Memory,
    /// Where the pieces of each layer begin, and where those of the last one end.
    firsts: Memory,
    /// The rate of every layer, by number.
    rates: Memory,
    /// Where every layer stands, and which of the pieces is its first, with their number at the end.
    layers: (Vec<Range<usize>>, Vec<usize>),
}

impl Layers {
    /// For a buffer of so many elements, of where parameters stand and whether they decay, and of LARS' coefficient.
    pub fn new(
        cuda: &Cuda,
        elements: usize,
        (decays, coefficient): (&[(Range<usize>, bool)], Option<f32>),
    ) -> Result<Self, CudaError> {
        let give = |bytes: &[u8], what: &str| {
            let memory = Memory::zeroed(cuda.context(), bytes.len(), what)?;
            cuda.stream().upload(memory.address(), bytes)?;
            Ok::<Memory, CudaError>(memory)
        };
        let bytes: Vec<u8> = marks(elements, decays).iter().flat_map(|mark| mark.to_le_bytes()).collect();
        let marks = give(&bytes, "which parameters decay")?;
        let rates = coefficient.map(|coefficient| {
            let (pieces, firsts) = pieces(decays);
            let words: Vec<u8> = pieces.iter().flat_map(|piece| [piece.start, piece.end]).flat_map(u64_bytes).collect();
            let starts: Vec<u8> = firsts.iter().flat_map(|&first| (first as u32).to_le_bytes()).collect();
            let ones: Vec<u8> = firsts.iter().flat_map(|_| 1.0f32.to_le_bytes()).collect();
            Ok::<Rates, CudaError>(Rates {
                coefficient,
                pieces: give(&words, "pieces of parameters")?,
                firsts: give(&starts, "pieces of parameters")?,
                rates: give(&ones, "rates of parameters")?,
                layers: (decays.iter().filter(|range| range.1).map(|range| range.0.clone()).collect(), firsts),
            })
        });
        Ok(Self { marks, rates: rates.transpose()? })
    }

    /// Bytes that it holds on the GPU.
    pub fn bytes(&self) -> usize {
        let rates = self.rates.iter().flat_map(|rates| [&rates.pieces, &rates.firsts, &rates.rates]);
        self.marks.bytes() + rates.map(Memory::bytes).sum::<usize>()
    }

    /// Whether what it does to some elements follows from them alone.
    pub fn can_update(&self, elements: &Range<usize>) -> bool {
        let cut = |layer: &Range<usize>| {
            let overlaps = layer.start < elements.end && elements.start < layer.end;
            overlaps && !(elements.start <= layer.start && layer.end <= elements.end)
        };
        !self.rates.iter().flat_map(|rates| &rates.layers.0).any(cut)
    }
}

impl Rates {
    /// Has the rates of the layers computed that stand among some elements; `tensors` are all weights and all
    /// gradients.
    fn launch(
        &self,
        builder: &mut Builder<'_>,
        (tensors, elements): ([Address; 2], &Range<usize>),
        [numbers, verdict]: [Address; 2],
    ) -> Result<(), CudaError> {
        let (ranges, firsts) = &self.layers;
        let before = |end: usize| ranges.partition_point(|layer| layer.start < end);
        let layers = before(elements.start)..before(elements.end);
        if layers.is_empty() {
            return Ok(());
        }
        // Sums stand by the pieces' numbers among those of all layers, so that all layers' firsts find them.
        let pieces = firsts[layers.start]..firsts[layers.end];
        let sums = builder.scratch(pieces.end * 2 * size_of::<f64>());
        let at = |memory: &Memory, index: usize, bytes: usize| {
            Argument::from(Address::Fixed(memory.address() + (index * bytes) as u64))
        };
        let [weights, gradients] = tensors.map(Argument::from);
        let words = at(&self.pieces, pieces.start, 2 * size_of::<u64>());
        let arguments =
            [weights, gradients, words, verdict.into(), sums.plus(pieces.start * 2 * size_of::<f64>()).into()];
        builder.launch("layer_squares", [pieces.len(), 1, 1], BLOCK, &arguments)?;
        let [firsts, rates] = [&self.firsts, &self.rates].map(|memory| at(memory, layers.start, size_of::<f32>()));
        let arguments = [sums.into(), firsts, numbers.into(), self.coefficient.into(), rates];
        builder.launch("layer_rates", [layers.len(), 1, 1], BLOCK, &arguments)
    }
}

/// What the optimizer's step is made with.
pub(super) struct Stepping {
    /// Which elements of the parameters it changes. They begin at a multiple of 16, and cut no layer that has a
    /// rate of its own.
    pub elements: Range<usize>,
    /// Where all gradients stand.
    pub gradients: u64,
    /// The numbers of the step.
    pub numbers: u64,
    /// The loss, which has to be a number; 0 for none.
    pub loss: u64,
    /// Where the verdict on the gradients goes.
    pub verdict: u64,
}

/// Bytes of a verdict.
pub(super) const VERDICT_BYTES: usize = 16;

impl GraphCompiler<'_> {
    /// What follows in training: the verdict and the step.
    pub fn update(&self, plan: &Plan) -> Result<Program, CudaError> {
        self.update_some(&Stepping {
            elements: 0..plan.parameters().length(),
            gradients: self.bases.gradients,
            numbers: self.numbers.address(),
            loss: self.output.address(),
            verdict: self.output.address() + 24,
        })
    }

    /// The verdict on some gradients, and the step of their parameters.
    pub fn update_some(&self, stepping: &Stepping) -> Result<Program, CudaError> {
        let Stepping { elements: ref range, gradients, numbers, loss, verdict } = *stepping;
        let [numbers, loss, verdict] = [numbers, loss, verdict].map(Address::Fixed);
        let from = |address: u64, bytes: usize| match address {
            0 => Address::Fixed(0),
            address => Address::Fixed(address + (range.start * bytes) as u64),
        };
        Program::of_calls(self.cuda, |builder| {
            let elements = range.len();
            let chunks = elements.div_ceil(4 * BLOCK as usize).min(self.cuda.multiprocessors() * 8).max(1);
            let partial = builder.scratch(chunks * size_of::<f64>());
            let arguments = [from(gradients, 4).into(), elements.into(), partial.into()];
            builder.launch("gradient_squares", [chunks, 1, 1], BLOCK, &arguments)?;
            let arguments = [partial.into(), (chunks as i32).into(), loss.into(), numbers.into(), verdict.into()];
            builder.launch("gradient_verdict", [1, 1, 1], BLOCK, &arguments)?;
            let tensors = [self.bases.parameters, gradients];
            let rates = self.layers.rates.as_ref();
            let all = (tensors.map(Address::Fixed), range);
            rates.map_or(Ok(()), |rates| rates.launch(builder, all, [numbers, verdict]))?;
            let slot = |index: usize| from(self.slots.get(index).map_or(0, Memory::address), 4);
            let mut arguments: Vec<Argument> = tensors.map(|address| from(address, 4).into()).into();
            arguments.extend([slot(0), slot(1), from(self.bases.rounded, 2)].map(Argument::from));
            let marks = self.layers.marks.address() + (range.start / 16 * size_of::<u16>()) as u64;
            let rates = rates.map_or(0, |rates| rates.rates.address());
            arguments.extend([marks, rates].map(Address::Fixed).map(Argument::from));
            arguments.push(elements.into());
            arguments.extend([numbers, verdict].map(Argument::from));
            builder.launch_each("update_parameters", elements.div_ceil(4), &arguments)
        })
    }
}

/// For every 16 elements, the number of their layer.
fn marks(elements: usize, ranges: &[(Range<usize>, bool)]) -> Vec<u16> {
    let mut marks = vec![0; elements.div_ceil(16)];
    for (number, (range, _)) in (1usize..).zip(ranges.iter().filter(|range| range.1)) {
        let number = u16::try_from(number).expect("a model has fewer than 65,536 tensors that decay");
        marks[range.start / 16..range.end.div_ceil(16)].fill(number);
    }
    marks
}

/// Pieces of the parameters that decay, and which of them is the first of each parameter.
fn pieces(ranges: &[(Range<usize>, bool)]) -> (Vec<Range<usize>>, Vec<usize>) {
    let (mut pieces, mut firsts) = (Vec::new(), vec![0]);
    for (range, _) in ranges.iter().filter(|range| range.1) {
        pieces.extend(range.clone().step_by(PIECE).map(|start| start..range.end.min(start + PIECE)));
        firsts.push(pieces.len());
    }
    (pieces, firsts)
}

fn u64_bytes(word: usize) -> [u8; 8] {
    (word as u64).to_le_bytes()
}

/// Writes the numbers of a step as the kernels read them.
pub(super) fn write_numbers(bytes: &mut [u8], numbers: &StepNumbers, rows: u32) {
    let mut at = 0;
    let mut put = |word: &[u8]| {
        bytes[at..at + word.len()].copy_from_slice(word);
        at += word.len();
    };
    put(&pass_bytes(numbers.pass));
    put(&numbers.norm_max.to_le_bytes());
    put(&rows.to_le_bytes());
    for rule in numbers.rules {
        let (kind, numbers) = constants(rule);
        put(&kind.to_le_bytes());
        numbers.iter().for_each(|number| put(&number.to_le_bytes()));
    }
}

/// A rule as the kernel `update_parameters` reads it.
fn constants(rule: Update) -> (i32, [f32; 9]) {
    let mut numbers = [0.0; 9];
    let mut put = |values: &[f32]| numbers[..values.len()].copy_from_slice(values);
    let kind = match rule {
        Update::Descent { rate, decay } => {
            put(&[rate, decay]);
            0
        }
        Update::Momentum { momentum, inside, outside, decay, ahead } => {
            put(&[momentum, inside, outside, decay]);
            if ahead { 2 } else { 1 }
        }
        Update::Adagrad { rate, epsilon, decay } => {
            put(&[rate, epsilon, decay]);
            3
        }
        Update::Adam { rate, root, betas, rests, epsilon, decay, kept } => {
            put(&[rate, root, betas[0], betas[1], rests[0], rests[1], epsilon, decay, kept]);
            4
        }
    };
    (kind, numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execute::Pass;

    #[test]
    fn the_numbers_of_a_step_fill_their_bytes() {
        let adam = Update::Adam {
            rate: 1.0,
            root: 2.0,
            betas: [3.0, 4.0],
            rests: [5.0, 6.0],
            epsilon: 7.0,
            decay: 8.0,
            kept: 9.0,
        };
        let mut bytes = [0; NUMBERS_BYTES];
        let pass = Pass { seed: 1, step: 2, first_sample: 3, samples: 4 };
        let numbers = StepNumbers { pass, norm_max: 3.0, rules: [adam; 2] };
        write_numbers(&mut bytes, &numbers, 7);
        let words: Vec<u64> =
            bytes[..PASS_BYTES].chunks(8).map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect();
        assert_eq!(words, [1, 2, 3, 4]);
        assert_eq!(u32::from_le_bytes(bytes[ROWS_AT as usize..][..4].try_into().unwrap()), 7);
        assert_eq!(f32::from_le_bytes(bytes[NUMBERS_BYTES - 4..].try_into().unwrap()), 9.0);
    }

    #[test]
    fn every_line_of_a_decaying_tensor_is_marked() {
        assert_eq!(marks(64, &[(0..10, true), (16..20, false), (32..50, true)]), [1, 0, 2, 2]);
    }

    #[test]
    fn pieces_cover_every_parameter_that_decays_once() {
        let (found, firsts) = pieces(&[(0..10, true), (16..20, false), (32..32 + 2 * PIECE + 5, true)]);
        let (second, third) = (32 + PIECE, 32 + 2 * PIECE);
        assert_eq!(found, [0..10, 32..second, second..third, third..third + 5]);
        assert_eq!(firsts, [0, 1, 4]);
    }
}
