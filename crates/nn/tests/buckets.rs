//! The messages of gradients of every model: in the order in which they become ready, every parameter once.

use paceline_nn::{Input, Mode, Network, zoo};
use paceline_tensor::Plan;

#[test]
fn buckets_of_every_model_come_in_ready_order() {
    for entry in zoo::all() {
        let side = entry.smallest.max(32);
        let input = match entry.native {
            Input::Image { channels, .. } => Input::Image { size: [side, side], channels },
            Input::Tokens { .. } => Input::Tokens { sequence: 8 },
        };
        let network = Network::new(entry, Mode::Train, 2, input, 10, 0.0).unwrap();
        let parameters = network.parameters.len();
        for bytes_max in [0, 1 << 20] {
            let plan = Plan::new(network.graph.clone(), &network.wanted(bytes_max));
            let buckets = plan.buckets();
            assert!(buckets.is_sorted_by_key(|bucket| bucket.ready_after), "{}: {buckets:?}", entry.name);
            let mut covered: Vec<usize> = buckets.iter().flat_map(|bucket| bucket.parameters.clone()).collect();
            covered.sort_unstable();
            assert!(covered.into_iter().eq(0..parameters), "{}", entry.name);
        }
    }
}
