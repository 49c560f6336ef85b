//! The program of the image that the node runs: the same as `src/main.rs`. `make test-node` links it as a static
//! program. It is an example, because cargo then links the dependencies that it has compiled for the tests; for a
//! program it would compile those again, without the features that tests add.
#![forbid(unsafe_code)]

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    lockstep::cli::main().await
}
