//! Lockstep against its limits: what the API server itself can write and deliver, and what a bare TLS server can
//! answer. Each figure is measured several times in turn with its floor, and with a controller on controller-runtime
//! (benches/peer), in the same run: ratios vary less between machines than durations do.
//!
//! `make bench` runs everything in less than 20 minutes, `make bench QUICK=1` less of it in less than three, and
//! `make bench ONLY=heal` one part. Tables, JSON and a picture are written to `target/bench`, or where `BENCH_OUTPUT`
//! says.

// Parts of the end-to-end tests, without the tests in them.
#![allow(dead_code, unused_imports)]

#[path = "../siege/exchange.rs"]
mod exchange;
#[path = "../../tests/e2e/fixture.rs"]
mod fixture;
#[path = "../../tests/e2e/harness.rs"]
mod harness;
mod mirror;
#[path = "../../tests/e2e/peer.rs"]
mod peer;
mod plane;
mod pure;
mod report;
mod scale;
#[path = "../../tests/e2e/users.rs"]
mod users;
mod webhook;

use std::{env, path::PathBuf, time::Instant};

use plane::Bench;
use report::Report;

#[tokio::main]
async fn main() {
    drop(rustls::crypto::ring::default_provider().install_default());
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [command, address, certificates] = arguments.as_slice()
        && command == "bare-webhook"
    {
        webhook::serve_bare(address, certificates.as_ref()).await;
    }
    let only = env::var("ONLY").unwrap_or_default();
    let wanted = |part: &str| part.contains(&*only);
    let quick = env::var("QUICK").is_ok_and(|quick| !quick.is_empty());
    let start = Instant::now();
    if wanted("pure") {
        pure::run();
    }
    let bench = Bench::start(quick).await;
    let mut report = Report::default();
    if wanted("start") {
        scale::start_and_binary(&bench, &mut report).await;
    }
    if wanted("cold-start") {
        mirror::cold_start(&bench, &mut report).await;
    }
    if wanted("fan-out") {
        mirror::fan_out(&bench, &mut report).await;
    }
    if wanted("heal") {
        mirror::heal(&bench, &mut report).await;
    }
    if wanted("beside") {
        mirror::beside_fan_out(&bench, &mut report).await;
    }
    if wanted("webhook") {
        webhook::reviews_a_cpu_second(&bench, &mut report).await;
        webhook::share_in_a_patch(&bench, &mut report).await;
    }
    if wanted("scale") {
        scale::sizes(&bench, &mut report).await;
    }
    if wanted("namespaces") {
        scale::namespaces(&bench, &mut report).await;
    }
    println!("\n{} s", start.elapsed().as_secs());
    let output = env::var_os("BENCH_OUTPUT").map_or_else(|| PathBuf::from("target/bench"), PathBuf::from);
    report.write(&output).expect("the report is written");
}
