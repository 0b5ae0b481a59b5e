//! Every model by name: listed, planned at its own size and at the smallest.

use crate::place::Place;

#[test]
fn every_model_is_listed_and_planned() {
    let place = Place::new();
    let models = place.json("models --json");
    let models = models.as_array().unwrap();
    assert!(models.len() >= 28);
    let table = place.run("models");
    for model in models {
        let name = model["name"].as_str().unwrap();
        assert!(table.contains(&format!("{name} ")), "{name}");
        let native = place.json(&format!("plan --model {name} --batch 2 --json"));
        assert_eq!(native["parameters"], model["parameters"], "{name}");
        let smallest = model["smallest"].as_u64().unwrap();
        place.json(&format!("plan --model {name} --batch 2 --size {smallest} --classes 7 --json"));
        if smallest > 1 {
            place.refuses(
                &format!("plan --model {name} --size {}", smallest - 1),
                &["type --size", &smallest.to_string()],
            );
        }
    }
    let count = |name: &str| models.iter().find(|model| model["name"] == name).unwrap()["parameters"].as_u64().unwrap();
    assert_eq!((count("vgg16"), count("resnet50")), (138_357_544, 25_557_032));
}
