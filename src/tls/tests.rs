//! Peers that stall, flood and send garbage do not keep others from being served.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::{
    body::{Body, Bytes},
    routing::{get as on_get, post as on_post},
};
use futures::future::join_all;
use http::StatusCode;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    sync::{Notify, Semaphore},
};

use super::*;
use crate::testing::peer::{API_SERVER_TIMEOUT, TestServer, get, post, read};

/// Answers with the length of the body.
fn router() -> Router {
    Router::new()
        .route("/length", on_post(|body: Bytes| async move { body.len().to_string() }))
        .route("/healthz", on_get(|| async { "ok\n" }))
}

async fn start() -> TestServer {
    TestServer::start(router(), ConnectionLimits::default()).await
}

async fn assert_serves(served: &TestServer) {
    assert_eq!(served.send(post("/length", "12345")).await, (StatusCode::OK, "5".to_owned()));
}

/// Reads until the server closes the connection, with or without an error.
async fn until_closed(mut stream: impl AsyncRead + Unpin) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    let reading = async {
        while let Ok(read @ 1..) = stream.read(&mut buffer).await {
            bytes.extend_from_slice(&buffer[..read]);
        }
    };
    timeout(API_SERVER_TIMEOUT, reading).await.expect("the server closes the connection in time");
    bytes
}

/// Waits until the metrics have a line.
async fn wait_for_metric(served: &TestServer, line: &str) {
    let shows = async {
        while !served.metrics.render().lines().any(|found| found == line) {
            tokio::task::yield_now().await;
        }
    };
    let outcome = timeout(API_SERVER_TIMEOUT, shows).await;
    outcome.unwrap_or_else(|_| panic!("{line} in\n{}", served.metrics.render()));
}

#[tokio::test]
async fn http1_and_http2_are_answered() {
    let served = start().await;
    let (mut first, _connection) = served.http1().await;
    let (mut second, _connection) = served.http2().await;
    for _ in 0..3 {
        let request = post("/length", "1234567");
        assert_eq!(read(first.send_request(request).await.unwrap()).await.1, "7");
        let request = post("/length", vec![b' '; 2_000_000]);
        assert_eq!(read(second.send_request(request).await.unwrap()).await.1, "2000000");
    }
    wait_for_metric(&served, "lockstep_webhook_connections 2").await;
    wait_for_metric(&served, "lockstep_webhook_handshakes_total{result=\"done\"} 2").await;
}

#[tokio::test]
async fn stalled_connections_delay_no_others() {
    let served = start().await;
    let silent = served.tcp().await;
    let mut hello = served.tcp().await;
    hello.write_all(&[0x16, 3, 1, 0x02, 0]).await.unwrap();
    let mut headers = served.tls("http/1.1").await;
    headers.write_all(b"POST /length HTTP/1.1\r\nhost: loc").await.unwrap();
    let mut body = served.tls("http/1.1").await;
    body.write_all(b"POST /length HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n12345")
        .await
        .unwrap();
    let preface = served.tls("h2").await;
    let (mut stream, _connection) = served.http2().await;
    let stalled = Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>());
    let unanswered = stream.send_request(post("/length", stalled));
    assert_serves(&served).await;
    // Another stream of the same connection is served, too.
    assert_eq!(read(stream.send_request(get("/healthz")).await.unwrap()).await.0, StatusCode::OK);
    drop((silent, hello, headers, body, preface, unanswered));
}

#[tokio::test]
async fn garbage_instead_of_tls_closes_the_connection() {
    let served = start().await;
    for garbage in [
        &b"GET /validate HTTP/1.1\r\nhost: a\r\n\r\n"[..],
        &[0xff; 4096],
        &[0; 64],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut stream = served.tcp().await;
        drop(stream.write_all(garbage).await);
        let answer = until_closed(stream).await;
        assert!(answer.is_empty() || answer[0] == 0x15, "nothing but an alert: {answer:?}");
    }
    wait_for_metric(&served, "lockstep_webhook_handshakes_total{result=\"failed\"} 4").await;
    assert_serves(&served).await;
}

#[tokio::test]
async fn tls_before_1_2_is_rejected() {
    let served = start().await;
    let protocol_version = [0x15, 3, 3, 0, 2, 2, 70];
    // A ClientHello of TLS 1.2 with different versions.
    for (minor, refused) in [(1, true), (2, true), (3, false)] {
        let mut hello = vec![3, minor];
        hello.extend([7; 32]);
        // No session, ECDHE with ECDSA and AES, no compression; x25519, SHA-256 with P-256, plain points.
        hello.extend([0, 0, 2, 0xc0, 0x2b, 1, 0]);
        let extensions = [0, 10, 0, 4, 0, 2, 0, 29, 0, 13, 0, 4, 0, 2, 4, 3, 0, 11, 0, 2, 1, 0];
        hello.extend([0, 22]);
        hello.extend(extensions);
        let length = u8::try_from(hello.len()).unwrap();
        let mut record = vec![0x16, 3, 1, 0, length + 4, 1, 0, 0, length];
        record.extend(hello);
        let mut stream = served.tcp().await;
        stream.write_all(&record).await.unwrap();
        let mut answer = [0; 7];
        timeout(API_SERVER_TIMEOUT, stream.read_exact(&mut answer)).await.unwrap().unwrap();
        assert_eq!(answer == protocol_version, refused, "{minor}: {answer:?}");
        assert_eq!(answer[0] == 0x16, !refused, "{minor}: {answer:?}");
    }
}

fn raise_file_limit() {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: most.maximum, maximum: most.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
}

#[tokio::test]
async fn thousand_idle_connections_keep_no_request_out() {
    raise_file_limit();
    let served = start().await;
    let ConnectionLimits { max_connections, max_closing, .. } = ConnectionLimits::default();
    let (mut early, _connection) = served.http2().await;
    assert_eq!(read(early.send_request(get("/healthz")).await.unwrap()).await.0, StatusCode::OK);
    let mut idle = Vec::new();
    for _ in 0..1000 {
        idle.push(served.tcp().await);
    }
    assert_serves(&served).await;
    let mut shaken = Vec::new();
    for _ in 0..max_connections + max_closing {
        shaken.push(served.tls("http/1.1").await);
    }
    assert_serves(&served).await;
    // The connection that was used before is kept, and the number of connections is bounded.
    assert_eq!(read(early.send_request(get("/healthz")).await.unwrap()).await.0, StatusCode::OK);
    let text = served.metrics.render();
    let shown = text.lines().find_map(|line| line.strip_prefix("lockstep_webhook_connections ")).unwrap();
    assert!(shown.parse::<usize>().unwrap() <= max_connections + max_closing, "{shown}");
}

#[tokio::test]
async fn thousand_unfinished_requests_keep_no_request_out_of_a_plain_port() {
    raise_file_limit();
    let limits = ConnectionLimits { max_connections: 64, max_closing: 16, ..ConnectionLimits::default() };
    let served = TestServer::plain(router(), limits).await;
    let mut unfinished = Vec::new();
    for _ in 0..1000 {
        let mut stream = served.tcp().await;
        stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: loc").await.unwrap();
        unfinished.push(stream);
    }
    let mut probe = served.tcp().await;
    probe.write_all(b"GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
    assert!(until_closed(probe).await.starts_with(b"HTTP/1.1 200"));
    // All but the last ones were closed.
    for stream in unfinished.drain(..1000 - 64 - 16) {
        until_closed(stream).await;
    }
}

#[tokio::test]
async fn stalled_bodies_on_every_connection_keep_no_request_out() {
    let begun = Arc::new(Semaphore::new(0));
    let beginning = begun.clone();
    let slow = on_post(move |body: Body| async move {
        beginning.add_permits(1);
        drop(axum::body::to_bytes(body, usize::MAX).await);
    });
    let limits = ConnectionLimits { max_connections: 16, max_closing: 4, ..ConnectionLimits::default() };
    let served = TestServer::start(router().route("/slow", slow), limits).await;
    let mut stalled = Vec::new();
    for _ in 0..40 {
        let mut stream = served.tls("http/1.1").await;
        stream.write_all(b"POST /slow HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n1").await.unwrap();
        begun.acquire().await.unwrap().forget();
        stalled.push(stream);
    }
    assert_serves(&served).await;
}

#[tokio::test]
async fn connection_without_a_request_is_closed() {
    // Enough time for the requests of this test.
    let limits = ConnectionLimits {
        first_request_timeout: Duration::from_secs(1),
        sweep_interval: Duration::from_millis(10),
        ..ConnectionLimits::default()
    };
    let served = TestServer::start(router(), limits).await;
    let (mut asked, _connection) = served.http2().await;
    assert_eq!(read(asked.send_request(get("/healthz")).await.unwrap()).await.0, StatusCode::OK);
    let silent = served.tcp().await;
    let shaken = served.tls("h2").await;
    let mut headers = served.tls("http/1.1").await;
    headers.write_all(b"POST /length HTTP/1.1\r\nhost: loc").await.unwrap();
    tokio::join!(until_closed(silent), until_closed(shaken), until_closed(headers));
    assert_eq!(read(asked.send_request(get("/healthz")).await.unwrap()).await.0, StatusCode::OK);
    wait_for_metric(&served, "lockstep_webhook_connections 1").await;
}

#[tokio::test]
async fn unfinished_handshake_times_out() {
    let limits =
        ConnectionLimits { handshake_timeout: Duration::from_millis(50), ..ConnectionLimits::default() };
    let served = TestServer::start(router(), limits).await;
    until_closed(served.tcp().await).await;
    wait_for_metric(&served, "lockstep_webhook_handshakes_total{result=\"failed\"} 1").await;
}

#[tokio::test]
async fn unfinished_headers_time_out() {
    const ONE_REQUEST_AND_A_PART: &[u8] =
        b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\nGET /healthz HTTP/1.1\r\nhost: lo";
    let limits =
        ConnectionLimits { header_timeout: Duration::from_millis(500), ..ConnectionLimits::default() };
    let served = TestServer::start(router(), limits.clone()).await;
    let mut stream = served.tls("http/1.1").await;
    stream.write_all(ONE_REQUEST_AND_A_PART).await.unwrap();
    assert!(until_closed(stream).await.starts_with(b"HTTP/1.1 200"));

    let served = TestServer::plain(router(), limits).await;
    let mut stream = served.tcp().await;
    stream.write_all(ONE_REQUEST_AND_A_PART).await.unwrap();
    assert!(until_closed(stream).await.starts_with(b"HTTP/1.1 200"));
}

#[tokio::test]
async fn answer_before_shutdown_is_the_last_on_its_http1_connection() {
    let served = start().await;
    let (mut first, _connection) = served.http1().await;
    let (mut second, _connection) = served.http2().await;
    for stopping in [false, true] {
        if stopping {
            served.readiness.mark_false(Condition::NotStopping);
        }
        let answer = first.send_request(get("/healthz")).await.unwrap();
        assert_eq!(answer.headers().get(CONNECTION).is_some_and(|value| value == "close"), stopping);
        read(answer).await;
        // HTTP/2 has no such header.
        let answer = second.send_request(get("/healthz")).await.unwrap();
        assert_eq!(answer.headers().get(CONNECTION), None);
        read(answer).await;
    }
}

#[tokio::test]
async fn shutdown_waits_for_requests_in_progress_and_for_nothing_else() {
    let (begun, go) = (Arc::new(Semaphore::new(0)), Arc::new(Notify::new()));
    let (beginning, going) = (begun.clone(), go.clone());
    let slow = on_get(move || async move {
        beginning.add_permits(1);
        going.notified().await;
        "done"
    });
    // The shutdown must not end by its own timeout.
    let limits = ConnectionLimits { close_timeout: API_SERVER_TIMEOUT * 100, ..ConnectionLimits::default() };
    let served = TestServer::start(router().route("/slow", slow), limits).await;
    let (mut idle, idle_connection) = served.http2().await;
    assert_eq!(read(idle.send_request(get("/healthz")).await.unwrap()).await.0, StatusCode::OK);
    let mut partly = served.tls("http/1.1").await;
    partly.write_all(b"GET /healthz HTTP/1.1\r\nhost: loc").await.unwrap();
    let (unused, silent) = (served.tls("h2").await, served.tcp().await);
    let (mut first, _connection) = served.http1().await;
    let (mut second, _connection) = served.http2().await;
    let first = tokio::spawn(async move { read(first.send_request(get("/slow")).await.unwrap()).await });
    let second = tokio::spawn(async move { read(second.send_request(get("/slow")).await.unwrap()).await });
    drop(begun.acquire_many(2).await.unwrap());

    served.stop.send_replace(true);
    // GOAWAY: the connection ends without an error.
    timeout(API_SERVER_TIMEOUT, idle_connection).await.unwrap().unwrap().unwrap();
    until_closed(partly).await;
    until_closed(unused).await;
    until_closed(silent).await;
    assert!(tokio::net::TcpStream::connect(served.address).await.is_err(), "no new connections");
    assert!(!served.task.is_finished());
    go.notify_waiters();
    for answer in [first, second] {
        assert_eq!(answer.await.unwrap(), (StatusCode::OK, "done".to_owned()));
    }
    timeout(API_SERVER_TIMEOUT, served.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn shutdown_ends_although_a_request_hangs() {
    let limits = ConnectionLimits { close_timeout: Duration::from_millis(50), ..ConnectionLimits::default() };
    let begun = Arc::new(Semaphore::new(0));
    let beginning = begun.clone();
    let stuck = on_get(move || async move {
        beginning.add_permits(1);
        std::future::pending::<&'static str>().await
    });
    let served = TestServer::start(Router::new().route("/stuck", stuck), limits).await;
    let (mut client, _connection) = served.http2().await;
    let unanswered = tokio::spawn(async move { client.send_request(get("/stuck")).await.is_err() });
    begun.acquire().await.unwrap().forget();
    served.stop.send_replace(true);
    timeout(API_SERVER_TIMEOUT, served.task).await.unwrap().unwrap();
    assert!(unanswered.await.unwrap());
}

// --- HTTP/2, frame by frame

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The headers of a request: method (2: GET, 3: POST), https, localhost, path.
fn request_headers(method: u8, path: &str) -> Vec<u8> {
    let length = |text: &str| u8::try_from(text.len()).unwrap();
    let mut block = vec![0x80 | method, 0x87, 0x01, 9];
    block.extend(b"localhost");
    block.extend([0x04, length(path)]);
    block.extend(path.bytes());
    block
}

fn literal(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

/// Sends frames until the server closes the connection: how many bytes were sent, and the frames that came
/// back as (kind, stream, payload).
async fn flood(
    served: &TestServer,
    frames: impl Iterator<Item = Vec<u8>>,
) -> (usize, Vec<(u8, u32, Vec<u8>)>) {
    let (reader, mut writer) = tokio::io::split(served.tls("h2").await);
    let reading = tokio::spawn(until_closed(reader));
    let sending = async {
        let mut sent = 0;
        writer.write_all(PREFACE).await.unwrap();
        for frame in frames {
            if reading.is_finished() || writer.write_all(&frame).await.is_err() {
                break;
            }
            sent += frame.len();
        }
        drop(writer.flush().await);
        sent
    };
    let sent = timeout(API_SERVER_TIMEOUT, sending).await.expect("the server keeps reading");
    let bytes = reading.await.unwrap();
    let mut rest = &*bytes;
    let mut frames = Vec::new();
    while rest.len() >= 9 {
        let length = u32::from_be_bytes([0, rest[0], rest[1], rest[2]]) as usize;
        let stream = u32::from_be_bytes([rest[5], rest[6], rest[7], rest[8]]);
        let end = (9 + length).min(rest.len());
        frames.push((rest[3], stream, rest[9..end].to_vec()));
        rest = &rest[end..];
    }
    (sent, frames)
}

/// The error code of the last GOAWAY.
fn goaway(frames: &[(u8, u32, Vec<u8>)]) -> Option<u8> {
    frames.iter().rev().find(|(kind, ..)| *kind == 7).map(|(_, _, payload)| payload[7])
}

const ENHANCE_YOUR_CALM: u8 = 11;

#[tokio::test]
async fn rapid_reset_closes_the_connection() {
    let (begun, counter) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counting = counter.clone();
    let stuck = on_get(move || async move {
        counting.fetch_add(1, Ordering::Relaxed);
        std::future::pending::<&'static str>().await
    });
    let served = TestServer::start(router().route("/stuck", stuck), ConnectionLimits::default()).await;
    let streams = begun.clone();
    let frames = (0..200_000_u32).map(move |number| {
        streams.fetch_add(1, Ordering::Relaxed);
        let stream = 2 * number + 1;
        let open = frame(HEADERS, END_STREAM | END_HEADERS, stream, &request_headers(2, "/stuck"));
        [open, frame(RST_STREAM, 0, stream, &[0, 0, 0, 8])].concat()
    });
    let (_, answers) = flood(&served, frames).await;
    assert_eq!(goaway(&answers), Some(ENHANCE_YOUR_CALM), "{answers:?}");
    assert!(begun.load(Ordering::Relaxed) < 200_000 && counter.load(Ordering::Relaxed) < 2000);
    assert_serves(&served).await;
}

#[tokio::test]
async fn endless_headers_close_the_connection() {
    let served = start().await;
    let open = frame(HEADERS, END_STREAM, 1, &request_headers(2, "/healthz"));
    let filler: Vec<u8> = (0..60).flat_map(|_| literal("x-a", &"b".repeat(100))).collect();
    let more = std::iter::repeat_with(move || frame(CONTINUATION, 0, 1, &filler)).take(20_000);
    let (sent, answers) = flood(&served, std::iter::once(open).chain(more)).await;
    assert!(goaway(&answers).is_some(), "{answers:?}");
    // No more than the buffers of the two sockets.
    assert!(sent < 16 << 20, "{sent}");
    assert_serves(&served).await;
}

#[tokio::test]
async fn headers_that_decompress_to_too_much_are_rejected() {
    let served = start().await;
    // One large header in the HPACK table, then a thousand references to it.
    let mut block = request_headers(2, "/healthz");
    block.extend([0x40, 3, b'x', b'-', b'a', 0x7f, 0xa1, 0x17]);
    block.extend([b'b'; 3104]);
    block.extend([0xbe; 1000]);
    let open = frame(HEADERS, END_STREAM | END_HEADERS, 1, &block);
    let (_, answers) = flood(&served, std::iter::once(open)).await;
    let refused = answers.iter().any(|(kind, _, payload)| match *kind {
        HEADERS => payload.windows(3).any(|text| text == b"431") || payload.first() == Some(&0x48),
        RST_STREAM | 7 => true,
        _ => false,
    });
    assert!(refused, "{answers:?}");
    assert_serves(&served).await;
}

#[tokio::test]
async fn streams_beyond_the_limit_are_refused() {
    let counter = Arc::new(AtomicUsize::new(0));
    let counting = counter.clone();
    let stuck = on_get(move || async move {
        counting.fetch_add(1, Ordering::Relaxed);
        std::future::pending::<&'static str>().await
    });
    let limits = ConnectionLimits { idle_timeout: Duration::from_millis(100), ..ConnectionLimits::default() };
    let served = TestServer::start(router().route("/stuck", stuck), limits).await;
    let frames = (0..5000_u32).map(|number| {
        frame(HEADERS, END_STREAM | END_HEADERS, 2 * number + 1, &request_headers(2, "/stuck"))
    });
    let (_, answers) = flood(&served, frames).await;
    assert!(counter.load(Ordering::Relaxed) <= 64, "{counter:?}");
    let refused = answers.iter().filter(|(kind, _, payload)| *kind == RST_STREAM && payload[3] == 7).count();
    assert!(refused > 0 && goaway(&answers) == Some(ENHANCE_YOUR_CALM), "{refused} {answers:?}");
    assert_serves(&served).await;
}

#[tokio::test]
async fn simultaneous_connections_are_all_answered() {
    let served = start().await;
    let requests = (0..20).map(|_| assert_serves(&served));
    join_all(requests).await;
}
