//! The few TensorBoard messages that are written here, declared by hand: field numbers as in TensorFlow's `event.proto`,
//! `summary.proto`, `tensor.proto` and `tensor_shape.proto`. Fields that are never written are left out; protobuf
//! readers do not miss them.

/// One record of an event file.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    /// Optimizer updates done.
    #[prost(int64, tag = "2")]
    pub step: i64,
    /// What the record holds.
    #[prost(oneof = "What", tags = "3, 5, 7")]
    pub what: Option<What>,
}

/// What a record holds.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum What {
    /// The format's version, in the first record only.
    #[prost(string, tag = "3")]
    FileVersion(String),
    /// Values.
    #[prost(message, tag = "5")]
    Summary(Summary),
    /// A process began: what a reader holds at this step or later is void.
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// Values of one step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Summary {
    /// The values.
    #[prost(message, repeated, tag = "1")]
    pub value: Vec<Value>,
}

/// One value under its tag.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    /// The name of the curve.
    #[prost(string, tag = "1")]
    pub tag: String,
    /// The number or the text.
    #[prost(oneof = "Content", tags = "2, 8")]
    pub content: Option<Content>,
    /// Which TensorBoard plugin shows it; scalars need none.
    #[prost(message, optional, tag = "9")]
    pub metadata: Option<Metadata>,
}

/// The number or the text of a [`Value`].
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Content {
    /// A scalar.
    #[prost(float, tag = "2")]
    SimpleValue(f32),
    /// Text, as a tensor of strings.
    #[prost(message, tag = "8")]
    Tensor(Tensor),
}

/// Which plugin shows a value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Metadata {
    /// The plugin.
    #[prost(message, optional, tag = "1")]
    pub plugin_data: Option<PluginData>,
}

/// A plugin by name.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PluginData {
    /// `text` here.
    #[prost(string, tag = "1")]
    pub plugin_name: String,
}

/// TensorFlow's number for strings in [`Tensor::dtype`].
pub const DT_STRING: i32 = 7;

/// A tensor of strings.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Tensor {
    /// [`DT_STRING`].
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    /// How many strings, as a shape of one dim.
    #[prost(message, optional, tag = "2")]
    pub tensor_shape: Option<Shape>,
    /// The strings.
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub string_val: Vec<Vec<u8>>,
}

/// A tensor's shape.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Shape {
    /// Its dims.
    #[prost(message, repeated, tag = "2")]
    pub dim: Vec<Dim>,
}

/// One dim of a shape.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Dim {
    /// Its length.
    #[prost(int64, tag = "1")]
    pub size: i64,
}

/// TensorFlow's number for "a process began" in [`SessionLog::status`].
pub const SESSION_START: i32 = 1;

/// A process began.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct SessionLog {
    /// [`SESSION_START`].
    #[prost(int32, tag = "1")]
    pub status: i32,
}
