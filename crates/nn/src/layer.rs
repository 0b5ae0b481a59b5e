//! The options of layers that have many: convolution, normalisation, pooling windows. Plain values with chained setters.

use paceline_tensor::window::Padding;

use crate::init::Init;

/// How much an image is padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pad {
    /// These many pixels.
    By(Padding),
    /// Keras' "same": ⌈size/stride⌉ output pixels, the odd zero below and right.
    Same,
}

/// A convolution layer.
#[derive(Clone, Copy, Debug)]
pub struct Conv {
    pub(crate) channels: usize,
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) padding: Pad,
    pub(crate) dilation: usize,
    pub(crate) groups: usize,
    pub(crate) bias: bool,
    pub(crate) init: Option<Init>,
    pub(crate) bias_init: Option<Init>,
}

impl Conv {
    /// `channels` outputs from a square kernel at stride 1, without padding, with a bias.
    pub const fn new(channels: usize, kernel: usize) -> Self {
        Self::rectangular(channels, [kernel, kernel])
    }

    /// As [`Conv::new`] with a kernel of (height, width).
    pub const fn rectangular(channels: usize, kernel: [usize; 2]) -> Self {
        let padding = Pad::By(Padding::all(0));
        Self {
            channels,
            kernel,
            stride: [1, 1],
            padding,
            dilation: 1,
            groups: 1,
            bias: true,
            init: None,
            bias_init: None,
        }
    }

    /// The step of the window.
    pub const fn stride(mut self, stride: usize) -> Self {
        self.stride = [stride, stride];
        self
    }

    /// Zeros on every side.
    pub const fn pad(mut self, size: usize) -> Self {
        self.padding = Pad::By(Padding::all(size));
        self
    }

    /// Zeros as given, side by side.
    pub const fn padding(mut self, padding: Padding) -> Self {
        self.padding = Pad::By(padding);
        self
    }

    /// Keras' "same" padding.
    pub const fn same(mut self) -> Self {
        self.padding = Pad::Same;
        self
    }

    /// The distance between taps.
    pub const fn dilation(mut self, dilation: usize) -> Self {
        self.dilation = dilation;
        self
    }

    /// Independent parts of the channels.
    pub const fn groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }

    /// Leaves the bias out, as before a batch normalisation.
    pub const fn no_bias(mut self) -> Self {
        self.bias = false;
        self
    }

    /// Starts the weight by this rule instead of PyTorch's default.
    pub const fn init(mut self, init: Init) -> Self {
        self.init = Some(init);
        self
    }

    /// Starts the bias by this rule instead of PyTorch's default.
    pub const fn bias_init(mut self, init: Init) -> Self {
        self.bias_init = Some(init);
        self
    }
}

/// A batch normalisation layer.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Added to the variance.
    pub epsilon: f32,
    /// Share of the batch's statistics in the new running ones.
    pub momentum: f32,
    /// Whether there is a learned scale.
    pub scale: bool,
    /// What the scale starts at; 0 lets a residual block start as the identity.
    pub scale_start: f32,
}

impl Norm {
    /// PyTorch's defaults.
    pub const TORCH: Self = Self { epsilon: 1e-5, momentum: 0.1, scale: true, scale_start: 1.0 };
    /// Keras' defaults: its momentum 0.99 keeps that share of the *old* statistics. One thing is PyTorch's here too: the
    /// running variance is over n − 1 values, where Keras divides by n.
    pub const KERAS: Self = Self { epsilon: 1e-3, momentum: 0.01, scale: true, scale_start: 1.0 };
}

/// A sliding pooling window.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) padding: Pad,
    pub(crate) ceil: bool,
    pub(crate) count_padding: bool,
}

impl Window {
    /// A square window that moves by its own size.
    pub const fn new(kernel: usize) -> Self {
        let padding = Pad::By(Padding::all(0));
        Self { kernel: [kernel; 2], stride: [kernel; 2], padding, ceil: false, count_padding: true }
    }

    /// The step of the window.
    pub const fn stride(mut self, stride: usize) -> Self {
        self.stride = [stride; 2];
        self
    }

    /// Padding on every side.
    pub const fn pad(mut self, size: usize) -> Self {
        self.padding = Pad::By(Padding::all(size));
        self
    }

    /// Keras' "same" padding; a mean then divides by the real pixels, as there.
    pub const fn same(mut self) -> Self {
        self.padding = Pad::Same;
        self.count_padding = false;
        self
    }

    /// Rounds the number of windows up.
    pub const fn ceil(mut self) -> Self {
        self.ceil = true;
        self
    }

    /// A mean divides by the real pixels only.
    pub const fn real_pixels(mut self) -> Self {
        self.count_padding = false;
        self
    }
}
