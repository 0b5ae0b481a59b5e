//! The ten figures, each within the unit circle, as signed distances to their edges. Called by the drawing in `shapes.rs`.

/// A class of `shapes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figure {
    Disc,
    Ring,
    Square,
    Frame,
    Triangle,
    Cross,
    Star,
    Crescent,
    Hourglass,
    Arrow,
}

type Point = [f32; 2];

const SQUARE: [Point; 4] = [[-0.7, -0.7], [0.7, -0.7], [0.7, 0.7], [-0.7, 0.7]];
/// Smaller than the square by its stroke, so that its corners stay in the circle.
const FRAME: [Point; 4] = [[-0.6, -0.6], [0.6, -0.6], [0.6, 0.6], [-0.6, 0.6]];
const TRIANGLE: [Point; 3] = [[0.0, -1.0], [0.866, 0.5], [-0.866, 0.5]];
const CROSS: [Point; 12] = [
    [-0.26, -0.95],
    [0.26, -0.95],
    [0.26, -0.26],
    [0.95, -0.26],
    [0.95, 0.26],
    [0.26, 0.26],
    [0.26, 0.95],
    [-0.26, 0.95],
    [-0.26, 0.26],
    [-0.95, 0.26],
    [-0.95, -0.26],
    [-0.26, -0.26],
];
/// Outer points on the unit circle every 72°, inner ones at radius 0.42 between them.
const STAR: [Point; 10] = [
    [0.0, -1.0],
    [0.2469, -0.3398],
    [0.9511, -0.3090],
    [0.3994, 0.1298],
    [0.5878, 0.8090],
    [0.0, 0.42],
    [-0.5878, 0.8090],
    [-0.3994, 0.1298],
    [-0.9511, -0.3090],
    [-0.2469, -0.3398],
];
/// Its sides cross in the middle, where inside becomes outside: two triangles, tip to tip.
const HOURGLASS: [Point; 4] = [[-0.66, -0.75], [0.66, -0.75], [-0.66, 0.75], [0.66, 0.75]];
const ARROW: [Point; 7] =
    [[0.0, -1.0], [0.75, -0.15], [0.24, -0.15], [0.24, 0.95], [-0.24, 0.95], [-0.24, -0.15], [-0.75, -0.15]];

impl Figure {
    /// All of them, in the order of their class numbers.
    pub const ALL: [Self; 10] = [
        Self::Disc,
        Self::Ring,
        Self::Square,
        Self::Frame,
        Self::Triangle,
        Self::Cross,
        Self::Star,
        Self::Crescent,
        Self::Hourglass,
        Self::Arrow,
    ];

    /// The class name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Disc => "disc",
            Self::Ring => "ring",
            Self::Square => "square",
            Self::Frame => "frame",
            Self::Triangle => "triangle",
            Self::Cross => "cross",
            Self::Star => "star",
            Self::Crescent => "crescent",
            Self::Hourglass => "hourglass",
            Self::Arrow => "arrow",
        }
    }

    /// The distance from `point` to the figure's edge, negative inside.
    pub fn distance(self, point: Point) -> f32 {
        match self {
            Self::Disc => circle(point, [0.0, 0.0], 0.88),
            Self::Ring => outline(circle(point, [0.0, 0.0], 0.76), 0.18),
            Self::Square => polygon(&SQUARE, point),
            Self::Frame => outline(polygon(&FRAME, point), 0.15),
            Self::Triangle => polygon(&TRIANGLE, point),
            Self::Cross => polygon(&CROSS, point),
            Self::Star => polygon(&STAR, point),
            // What is in one circle and not in the other.
            Self::Crescent => circle(point, [0.0, 0.0], 0.95).max(-circle(point, [0.5, 0.0], 0.75)),
            Self::Hourglass => polygon(&HOURGLASS, point),
            Self::Arrow => polygon(&ARROW, point),
        }
    }
}

fn circle([x, y]: Point, [cx, cy]: Point, radius: f32) -> f32 {
    ((x - cx) * (x - cx) + (y - cy) * (y - cy)).sqrt() - radius
}

/// The edge itself, drawn `half` wide on both sides.
fn outline(distance: f32, half: f32) -> f32 {
    distance.abs() - half
}

/// Distance to the nearest side; inside is where a ray to the right crosses the sides an odd number of times.
fn polygon(corners: &[Point], [x, y]: Point) -> f32 {
    let mut nearest = f32::MAX;
    let mut inside = false;
    let mut from = corners[corners.len() - 1];
    for &to in corners {
        let (ex, ey) = (to[0] - from[0], to[1] - from[1]);
        let (px, py) = (x - from[0], y - from[1]);
        let along = ((px * ex + py * ey) / (ex * ex + ey * ey)).clamp(0.0, 1.0);
        let (dx, dy) = (px - ex * along, py - ey * along);
        nearest = nearest.min(dx * dx + dy * dy);
        if (from[1] > y) != (to[1] > y) && px < ex * py / ey {
            inside = !inside;
        }
        from = to;
    }
    if inside { -nearest.sqrt() } else { nearest.sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_geometry() {
        let near = |left: f32, right: f32| assert!((left - right).abs() < 1e-5, "{left} {right}");
        near(Figure::Square.distance([0.0, 0.0]), -0.7);
        near(Figure::Square.distance([1.0, 0.0]), 0.3);
        near(Figure::Square.distance([1.0, 1.1]), 0.5);
        near(Figure::Ring.distance([0.0, 0.0]), 0.58);
        near(Figure::Ring.distance([0.76, 0.0]), -0.18);
        near(Figure::Disc.distance([0.0, 1.0]), 0.12);
    }

    #[test]
    fn every_figure_stays_within_the_circle_it_is_drawn_in_and_is_not_empty() {
        for figure in Figure::ALL {
            let grid = || (-60..=60).flat_map(|x| (-60..=60).map(move |y| [x as f32 / 50.0, y as f32 / 50.0]));
            let inside = grid().filter(|&point| figure.distance(point) < 0.0).count();
            assert!(inside > 1000, "{figure:?} {inside}");
            let escaped = grid().any(|[x, y]| x * x + y * y > 1.02 && figure.distance([x, y]) < 0.0);
            assert!(!escaped, "{figure:?} reaches outside");
        }
    }
}
