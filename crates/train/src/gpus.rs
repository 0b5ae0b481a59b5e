//! Which process computes on which GPU, and whether the GPUs of a run can add up their gradients: decided by pure functions of what
//! all ranks say of themselves, before NCCL is asked anything.
//!
//! One process per GPU: the vendor advises against several on one, and NCCL would refuse them late and in other words.

use paceline_comm::{CommError, Communicator, Rank};
use paceline_data::order::Shard;
use paceline_tensor::device::cuda::nccl::{self, KEY_BYTES, Key, Placement, version_text};
use paceline_tensor::device::cuda::{Cuda, CudaError};

use crate::compute::Compute;
use crate::error::TrainError;

/// The GPU that a process computes on, by number: `local` says which process of how many it is on its machine, `shares` whether several
/// may compute on one, which NCCL does not allow, and `found` how many GPUs it sees there.
///
/// # Errors
/// When two processes would get one GPU and may not; the sentence says what to type.
pub fn choose(device: Compute, (local, shares): (Shard, bool), found: usize) -> Result<Option<usize>, String> {
    let Shard { rank, world } = local;
    match device {
        Compute::Cpu => Ok(None),
        Compute::Cuda(Some(number)) if shares => Ok(Some(number)),
        Compute::Cuda(None) if shares => Ok(Some(rank % found.max(1))),
        Compute::Cuda(Some(number)) if world > 1 => Err(format!(
            "--device cuda:{number} is one GPU and {world} processes run on this machine; type --device cuda, which gives \
             each its own"
        )),
        Compute::Cuda(Some(number)) => Ok(Some(number)),
        // Schedulers often show each process its own GPU only; whether it really is its own is seen when all have met.
        Compute::Cuda(None) if found == 1 => Ok(Some(0)),
        Compute::Cuda(None) if rank < found => Ok(Some(rank)),
        // Where there is none at all, the driver has a sentence for it.
        Compute::Cuda(None) if found == 0 => Ok(Some(0)),
        Compute::Cuda(None) => Err(too_few(world, found)),
    }
}

/// Whether so many processes of one machine can have a GPU each; before they are started.
///
/// # Errors
/// When there are too few GPUs.
pub fn enough(device: Compute, (workers, shares): (usize, bool), found: usize) -> Result<(), String> {
    choose(device, (Shard { rank: 0, world: workers }, shares), found)?;
    // Where there is none at all, the driver has a sentence for it.
    if device == Compute::Cpu || shares || found == 0 || workers <= found {
        Ok(())
    } else {
        Err(too_few(workers, found))
    }
}

fn too_few(world: usize, found: usize) -> String {
    let gpus = if found == 1 { "one GPU".to_owned() } else { format!("{found} GPUs") };
    format!(
        "{world} processes need a GPU each to add up by NCCL and this machine shows {gpus}; type --workers {found}, or --carry shm, by \
         which processes can share a GPU"
    )
}

/// What a rank says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// The version of its NCCL; 0 if it has none.
    pub nccl: u32,
    /// Its GPU, told from all others.
    pub gpu: [u8; 16],
}

const CARD_BYTES: usize = 20;

impl Card {
    fn to_bytes(self) -> [u8; CARD_BYTES] {
        let mut bytes = [0; CARD_BYTES];
        bytes[..4].copy_from_slice(&self.nccl.to_le_bytes());
        bytes[4..].copy_from_slice(&self.gpu);
        bytes
    }

    fn from_bytes(bytes: [u8; CARD_BYTES]) -> Self {
        let [a, b, c, d, gpu @ ..] = bytes;
        Self { nccl: u32::from_le_bytes([a, b, c, d]), gpu }
    }
}

/// Gathers the cards of all ranks on every rank, by rank.
///
/// # Errors
/// When another rank, or the way to it, has failed.
pub fn gather_cards(communicator: &mut Communicator, own: Card) -> Result<Vec<Card>, CommError> {
    let mut cards = Vec::with_capacity(communicator.world());
    for rank in 0..communicator.world() {
        let mut bytes = own.to_bytes();
        communicator.broadcast_bytes(Rank::at(rank), &mut bytes)?;
        cards.push(Card::from_bytes(bytes));
    }
    Ok(cards)
}

/// Whether these GPUs can train together. All ranks come to the same answer.
///
/// # Errors
/// The first reason why not; the sentence names ranks and hosts.
pub fn check(cards: &[Card], hosts: &[String]) -> Result<(), String> {
    let name = |rank: usize| match hosts.get(rank) {
        Some(host) => format!("rank {rank} on {host}"),
        None => format!("rank {rank}"),
    };
    if let Some(rank) = cards.iter().position(|card| card.nccl == 0) {
        return Err(format!(
            "{} found no NCCL (libnccl.so.2), by which GPUs add up gradients; install it there or add its folder to \
             LD_LIBRARY_PATH, or type --device cpu",
            name(rank)
        ));
    }
    for (rank, card) in cards.iter().enumerate() {
        if let Some(first) = cards[..rank].iter().position(|other| other.gpu == card.gpu) {
            return Err(format!(
                "{} and {} compute on one GPU ({}); NCCL needs one process per GPU: type --workers with at most the number of \
                 GPUs, or show each process another one with CUDA_VISIBLE_DEVICES",
                name(first),
                name(rank),
                uuid_text(card.gpu)
            ));
        }
        // Two of one release have the same protocol; others may hang in each other's.
        if card.nccl / 100 != cards[0].nccl / 100 {
            return Err(format!(
                "{} has NCCL {} and {} has {}; install the same on all machines",
                name(0),
                version_text(cards[0].nccl),
                name(rank),
                version_text(card.nccl)
            ));
        }
    }
    Ok(())
}

/// As `nvidia-smi -L` writes it.
fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Meets the other ranks: none if this process is alone. Where they will find each other's GPUs, and this
/// rank's place there.
///
/// # Errors
/// When the GPUs cannot train together (a refusal), or another rank, or the way to it, has failed.
pub fn meet(
    communicator: Option<&mut Communicator>,
    cuda: &Cuda,
    hosts: &[String],
) -> Result<(Key, Placement), TrainError> {
    let version = nccl::version();
    let Some(communicator) = communicator else {
        version.map_err(refused)?;
        return Ok((nccl::key().map_err(refused)?, Placement { number: 0, of: 1 }));
    };
    let own = Card { nccl: *version.as_ref().unwrap_or(&0), gpu: cuda.uuid()? };
    let cards = gather_cards(communicator, own)?;
    // Who has no NCCL itself can say where it was looked for.
    version.map_err(refused)?;
    check(&cards, hosts).map_err(TrainError::Refused)?;
    let (rank, world) = (communicator.rank(), communicator.world());
    let made = if rank == Rank(0) { Some(nccl::key()) } else { None };
    let key = share(communicator, made)?;
    Ok((key, Placement { number: rank.index(), of: world }))
}

/// Brings rank 0's key to all ranks, or the news that it has none. `made` is rank 0's.
fn share(communicator: &mut Communicator, made: Option<Result<Key, CudaError>>) -> Result<Key, TrainError> {
    let mut bytes = [0; KEY_BYTES + 1];
    if let Some(Ok(key)) = &made {
        bytes[0] = 1;
        bytes[1..].copy_from_slice(key);
    }
    communicator.broadcast_bytes(Rank(0), &mut bytes)?;
    let [known, key @ ..] = bytes;
    match made {
        Some(Err(error)) => Err(error.into()),
        _ if known == 1 => Ok(key),
        _ => Err(TrainError::Gpu(CudaError("rank 0 could not begin NCCL; it says why".into()))),
    }
}

fn refused(error: CudaError) -> TrainError {
    TrainError::Refused(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(rank: usize, world: usize) -> (Shard, bool) {
        (Shard { rank, world }, false)
    }

    #[test]
    fn each_process_of_a_machine_gets_its_own_gpu() {
        let gpus = |world, found| (0..world).map(move |rank| choose(Compute::Cuda(None), local(rank, world), found));
        assert_eq!(gpus(4, 8).collect::<Result<Vec<_>, _>>(), Ok(vec![Some(0), Some(1), Some(2), Some(3)]));
        // Each is shown its own GPU only.
        assert_eq!(gpus(2, 1).collect::<Result<Vec<_>, _>>(), Ok(vec![Some(0), Some(0)]));
        let error = gpus(3, 2).collect::<Result<Vec<_>, _>>().unwrap_err();
        assert!(error.contains("3 processes need a GPU each") && error.contains("2 GPUs; type --workers 2"), "{error}");
        // Through hosts they share them.
        let shared = |rank| choose(Compute::Cuda(None), (Shard { rank, world: 3 }, true), 2);
        assert_eq!((0..3).map(shared).collect::<Result<Vec<_>, _>>(), Ok(vec![Some(0), Some(1), Some(0)]));
        assert_eq!(choose(Compute::Cpu, local(5, 6), 0), Ok(None));
    }

    #[test]
    fn a_gpu_that_is_named_is_for_one_process_of_a_machine() {
        assert_eq!(choose(Compute::Cuda(Some(3)), local(0, 1), 8), Ok(Some(3)));
        let error = choose(Compute::Cuda(Some(3)), local(1, 2), 8).unwrap_err();
        assert!(error.starts_with("--device cuda:3 is one GPU") && error.contains("type --device cuda,"), "{error}");
    }

    #[test]
    fn too_many_processes_are_refused_before_they_are_started() {
        assert_eq!(enough(Compute::Cuda(None), (2, false), 2), Ok(()));
        assert_eq!(enough(Compute::Cuda(None), (1, false), 0), Ok(()));
        assert_eq!(enough(Compute::Cpu, (64, false), 0), Ok(()));
        let error = enough(Compute::Cuda(None), (2, false), 1).unwrap_err();
        assert!(error.contains("this machine shows one GPU; type --workers 1"), "{error}");
        assert!(enough(Compute::Cuda(Some(0)), (2, false), 2).is_err());
    }

    fn card(nccl: u32, gpu: u8) -> Card {
        Card { nccl, gpu: [gpu; 16] }
    }

    #[test]
    fn ranks_that_share_a_gpu_are_named() {
        let hosts = ["a", "a", "b"].map(str::to_owned);
        assert_eq!(check(&[card(22_803, 1), card(22_803, 2), card(22_801, 3)], &hosts), Ok(()));
        let error = check(&[card(22_803, 1), card(22_803, 2), card(22_803, 2)], &hosts).unwrap_err();
        let uuid = "GPU-02020202-0202-0202-0202-020202020202";
        assert!(error.starts_with("rank 1 on a and rank 2 on b compute on one GPU") && error.contains(uuid), "{error}");
        assert!(error.contains("one process per GPU: type --workers"), "{error}");
    }

    #[test]
    fn a_rank_without_nccl_or_with_another_is_named() {
        let error = check(&[card(22_803, 1), card(0, 2)], &[]).unwrap_err();
        assert!(error.starts_with("rank 1 found no NCCL (libnccl.so.2)"), "{error}");
        let error = check(&[card(22_803, 1), card(21_800, 2)], &["a".into(), "b".into()]).unwrap_err();
        assert!(error.contains("rank 0 on a has NCCL 2.28.3 and rank 1 on b has 2.18.0"), "{error}");
    }

    #[test]
    fn a_card_survives_being_sent() {
        let card = Card { nccl: 22_803, gpu: std::array::from_fn(|index| index as u8) };
        assert_eq!(Card::from_bytes(card.to_bytes()), card);
        assert_eq!(uuid_text(card.gpu), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
