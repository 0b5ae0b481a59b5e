//! What an agreement has to know of a model.

use paceline_nn::Parameter;
use paceline_parallel::agree::{BucketShape, Shape};
use paceline_parallel::squeeze;
use paceline_tensor::Plan;
use paceline_tensor::plan::Bucket;

/// The buckets of a plan as an agreement sees them.
pub fn bucket_shapes(plan: &Plan) -> Vec<BucketShape> {
    let bucket_shape = |bucket: &Bucket| BucketShape {
        start: bucket.elements.start,
        elements: bucket.elements.len(),
        ready_after: bucket.ready_after,
        needed_before: bucket.needed_before,
    };
    plan.buckets().iter().map(bucket_shape).collect()
}

/// What an agreement has to know of a plan: buckets in the order in which they become final, and what they
/// hold.
pub(crate) fn shape(plan: &Plan, parameters: &[Parameter], slots: usize) -> Shape {
    let layout = plan.parameters();
    let segments = |bucket: &Bucket| {
        let segment = |number: usize| {
            let range = layout.range(number);
            let held = range.start.max(bucket.elements.start)..range.end.min(bucket.elements.end);
            let columns = parameters[number].shape.last().max(1);
            let (start, rows) = (held.start - bucket.elements.start, held.len() / columns);
            squeeze::Segment { start, rows, columns }
        };
        bucket.parameters.clone().map(segment).collect()
    };
    Shape {
        buckets: bucket_shapes(plan),
        segments: plan.buckets().iter().map(segments).collect(),
        parameters: layout.length(),
        states: plan.states().length(),
        slots,
    }
}
