//! MPI's own collectives, behind the same calls. Numbers are copied into memory that MPI may keep should the wait end early, and
//! the result is copied back: two passes over memory, a small part of what a network takes.

use bytemuck::{cast_slice, cast_slice_mut};
use paceline_system::clock;

use super::raw::Operation;
use super::{NAP, Port};
use crate::collective::Collective;
use crate::error::{CommError, Party};
use crate::reduce::{Kind, round_bf16, widen_bf16};
use crate::transfer::chunk;
use crate::wait::Wait;
use crate::wire::stream::Talk;

/// Bytes of a buffer that are staged at a time, where a collective can be done in parts.
const PART_BYTES: usize = 16 << 20;

/// How often to ask before napping, some tens of microseconds.
const LOOKS: u32 = 500;

impl Port {
    /// Does what all ranks do at this point.
    pub(crate) fn collective(
        &mut self,
        collective: Collective,
        kind: Kind,
        buffer: &mut [u8],
        wait: &Wait,
    ) -> Result<(), CommError> {
        match (collective, kind) {
            (Collective::AllReduce, Kind::Bf16) => {
                for part in cast_slice_mut::<u8, u16>(buffer).chunks_mut(PART_BYTES / 4) {
                    let numbers: Vec<f32> = part.iter().map(|&half| widen_bf16(half)).collect();
                    let sums = self.wait(collective, self.comm.all_reduce(numbers), wait)?;
                    part.iter_mut().zip(sums.numbers()).for_each(|(half, &sum)| *half = round_bf16(sum));
                }
            }
            (Collective::AllReduce, _) => {
                for part in cast_slice_mut::<u8, f32>(buffer).chunks_mut(PART_BYTES / 4) {
                    let sums = self.wait(collective, self.comm.all_reduce(part.to_vec()), wait)?;
                    part.copy_from_slice(sums.numbers());
                }
            }
            (Collective::ReduceScatter, Kind::Bf16) => {
                let halves = cast_slice_mut::<u8, u16>(buffer);
                let (own, lengths) = (self.own(halves.len()), self.lengths(halves.len()));
                let numbers: Vec<f32> = halves.iter().map(|&half| widen_bf16(half)).collect();
                let sums = self.wait(collective, self.comm.reduce_scatter(numbers, lengths), wait)?;
                halves[own].iter_mut().zip(sums.numbers()).for_each(|(half, &sum)| *half = round_bf16(sum));
            }
            (Collective::ReduceScatter, _) => {
                let own = self.own(buffer.len() / 4);
                let (numbers, lengths) = (cast_slice::<u8, f32>(buffer).to_vec(), self.lengths(buffer.len() / 4));
                let sums = self.wait(collective, self.comm.reduce_scatter(numbers, lengths), wait)?;
                cast_slice_mut::<u8, f32>(buffer)[own].copy_from_slice(sums.numbers());
            }
            (Collective::AllGather, _) => {
                let own = cast_slice::<u8, f32>(buffer)[self.own(buffer.len() / 4)].to_vec();
                let all = self.wait(collective, self.comm.all_gather(own, self.lengths(buffer.len() / 4)), wait)?;
                cast_slice_mut::<u8, f32>(buffer).copy_from_slice(all.numbers());
            }
            (Collective::AllToAll, _) => {
                let numbers = cast_slice::<u8, f32>(buffer).to_vec();
                let all = self.wait(collective, self.comm.all_to_all(numbers), wait)?;
                cast_slice_mut::<u8, f32>(buffer).copy_from_slice(all.numbers());
            }
            (Collective::Broadcast { root }, _) => {
                for part in buffer.chunks_mut(PART_BYTES) {
                    let told = self.wait(collective, self.comm.broadcast(root.index(), part.to_vec()), wait)?;
                    part.copy_from_slice(told.bytes());
                }
            }
            (Collective::Barrier, _) => drop(self.wait(collective, self.comm.barrier(), wait)?),
        }
        Ok(())
    }

    fn own(&self, length: usize) -> std::ops::Range<usize> {
        chunk(length, self.world(), self.comm.rank())
    }

    /// How many numbers belong to each rank.
    fn lengths(&self, length: usize) -> Vec<usize> {
        (0..self.world()).map(|rank| chunk(length, self.world(), rank).len()).collect()
    }

    /// Waits for the end of an operation, and gives what it leaves.
    fn wait(
        &self,
        collective: Collective,
        begun: Result<Operation, String>,
        wait: &Wait,
    ) -> Result<Operation, CommError> {
        let talk = Talk { rank: self.rank(), peer: Party::Anyone, phase: collective.name() };
        let mut operation = begun.map_err(|why| talk.gone(why))?;
        let mut looks = 0;
        while !operation.is_done().map_err(|why| talk.gone(why))? {
            looks += 1;
            if looks < LOOKS {
                std::hint::spin_loop();
                continue;
            }
            talk.check(wait)?;
            clock::sleep(NAP);
        }
        Ok(operation)
    }
}
