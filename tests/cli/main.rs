//! The binary as a person types it: every command, every refusal, and runs that are killed, starved and resumed.

mod calibrate;
mod commands;
mod damage;
mod data;
mod doctor;
mod escapes;
mod events;
mod examples;
mod failures;
mod files;
mod instructions;
mod launch;
mod matrix;
mod memory;
mod place;
mod ranks;
mod refusals;
mod restart;
mod resume;
mod saving;
mod signals;
mod strangers;
mod survivors;
mod together;
mod zoo;
