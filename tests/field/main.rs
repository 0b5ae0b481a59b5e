//! Paceline among the programs it meets outside: OpenMPI's and MPICH's `mpirun`, Slurm, hosts with a network between
//! them, and faults in the middle of a run. What a test needs and the machine does not have, it says by name.

mod doctor;
mod faults;
mod ground;
mod hosts;
mod links;
mod mpi;
mod network;
mod nodes;
mod overlap;
mod parts;
mod slurm;
