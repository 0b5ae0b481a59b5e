//! What a kernel is given besides its operands.

use super::isa::Isa;
use super::pool::Pool;
use super::scratch::Scratch;

/// The threads, the instruction set and the working memory a kernel may use. The device owns all three.
#[derive(Debug)]
pub struct Context<'a> {
    /// Threads.
    pub pool: &'a Pool,
    /// Instruction set; must be one the machine has.
    pub isa: Isa,
    /// Working memory, kept from call to call.
    pub scratch: &'a mut Scratch,
}

impl Context<'_> {
    /// The same context for a call made by a kernel.
    pub fn reborrow(&mut self) -> Context<'_> {
        Context { pool: self.pool, isa: self.isa, scratch: self.scratch }
    }
}
