//! A tensor of the reference: sizes and numbers, nothing clever. Integers are held as whole numbers.

/// Sizes, outermost first, and the elements in row order.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

impl Array {
    pub fn new(shape: &[usize], data: Vec<f64>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len());
        Self { shape: shape.to_vec(), data }
    }

    pub fn zeros(shape: &[usize]) -> Self {
        Self::new(shape, vec![0.0; shape.iter().product()])
    }

    /// The array whose element at each index is what `element` says.
    pub fn from_fn(shape: &[usize], mut element: impl FnMut(&[usize]) -> f64) -> Self {
        let mut array = Self::zeros(shape);
        let mut index = vec![0; shape.len()];
        for number in 0..array.data.len() {
            let mut rest = number;
            for dim in (0..shape.len()).rev() {
                index[dim] = rest % shape[dim];
                rest /= shape[dim];
            }
            array.data[number] = element(&index);
        }
        array
    }

    pub fn at(&self, index: &[usize]) -> f64 {
        self.data[self.position(index)]
    }

    pub fn at_mut(&mut self, index: &[usize]) -> &mut f64 {
        let position = self.position(index);
        &mut self.data[position]
    }

    pub fn map(&self, function: impl FnMut(f64) -> f64) -> Self {
        Self { shape: self.shape.clone(), data: self.data.iter().copied().map(function).collect() }
    }

    /// The size of the last dim.
    pub fn last(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// The number of rows along the last dim.
    pub fn rows(&self) -> usize {
        self.data.len() / self.last()
    }

    /// Where in `data` an element is.
    pub fn position(&self, index: &[usize]) -> usize {
        assert_eq!(index.len(), self.shape.len());
        index.iter().zip(&self.shape).fold(0, |position, (&index, &size)| {
            assert!(index < size);
            position * size + index
        })
    }
}
