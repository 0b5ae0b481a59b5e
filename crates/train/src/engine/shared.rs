//! Weights that all replicas of a machine map: the one place where an engine is handed memory that peers
//! write.
#![allow(unsafe_code)]

use paceline_parallel::Agreement;
use paceline_parallel::agree::SharedWeights;
use paceline_tensor::Buffer;

use super::Weights;
use super::cpu::{CpuEngine, EVALUATES};

impl CpuEngine {
    /// Uses memory that all replicas map, where an agreement has such; the first one's numbers are theirs
    /// all.
    pub(super) fn share_weights(&mut self, agreement: &mut dyn Agreement) {
        // SAFETY: this engine fills the weights on rank 0 alone, here, before the opening. Afterwards passes
        // read a bucket's weights and write its gradients only between the settling of its step, which
        // `Event::BeforeRead` waits for, and its next `Event::MayApply`; the optimizer's numbers are touched
        // only inside `Target::apply`, in the range of the piece that this rank holds. Who looks at them
        // between steps has settled all buckets, or has frozen them (`Agreement::freeze`).
        let Some(memory) = (unsafe { agreement.shared_weights() }) else { return };
        let SharedWeights { weights, optimizer, gradients } = memory;
        let fills = agreement.rank().0 == 0;
        let Weights { store, optimizer: own, .. } = &mut self.weights;
        let own = std::iter::once(&mut store.parameters).chain(own);
        for (own, mut shared) in own.zip(std::iter::once(weights).chain(optimizer)) {
            assert_eq!(own.len(), shared.len(), "all ranks have the same parameters");
            if fills {
                shared.copy_from_slice(own);
            }
            *own = Buffer::lent(Box::new(shared));
        }
        let train = self.train.as_mut().expect(EVALUATES);
        train.executor.keep_gradients(store, Buffer::lent(Box::new(gradients)));
        self.others.iter_mut().for_each(|graph| graph.executor.keep_gradients_too());
    }
}
