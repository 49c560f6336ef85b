//! Reviews as an API server sends them: over HTTP/1.1 on connections that stay open.

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufStream},
    net::TcpStream,
};
use tokio_rustls::client::TlsStream;

use crate::{harness::Cluster, peer::review_of};

/// A review, and whether the webhook must allow it.
pub(crate) struct Expected {
    pub body: String,
    pub uid: String,
    pub allowed: bool,
}

/// What an API server sends: mostly changes of sources that touch no right, some edits of companions, a few new sources
/// for which the webhook asks about rights.
pub(crate) fn reviews(cluster: &Cluster, home: &str) -> Vec<Expected> {
    let object = |name: &str, label: &str, annotations: Value, turn: &str| {
        json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": home, "uid": "u-1", "labels": {cluster.key(label): "true"},
                "annotations": annotations},
            "data": {"sky": "blue", "turn": turn},
        })
    };
    let of_source =
        json!({cluster.key("source"): format!("{home}/colors"), cluster.key("source-uid"): "u-1"});
    let companion = |turn: &str| object("colors-synced", "companion", of_source.clone(), turn);
    let plain = |turn: &str| {
        let mut object = object("colors", "managed", json!({}), turn);
        object["metadata"]["labels"]["note"] = turn.into();
        object
    };
    let source = |turn: &str| object("colors", "managed", json!({cluster.key("paused"): "true"}), turn);
    let new = object("shapes", "managed", json!({}), "1");
    let malformed = object("shapes", "managed", json!({cluster.key("target-namespaces"): "Team"}), "1");
    let all = [
        (review_of("UPDATE", home, "admin", &plain("1"), &plain("1")), true),
        (review_of("UPDATE", home, "admin", &source("1"), &source("1")), true),
        (review_of("UPDATE", home, "mallory", &companion("1"), &companion("2")), false),
        (review_of("CREATE", home, "mallory", &Value::Null, &companion("1")), false),
        (review_of("CREATE", home, "mallory", &Value::Null, &malformed), false),
        (review_of("CREATE", home, "mallory", &Value::Null, &new), false),
        (review_of("DELETE", home, "mallory", &companion("1"), &Value::Null), true),
    ];
    let expected = |(number, (mut review, allowed)): (usize, (Value, bool))| {
        let uid = format!("uid-{number}");
        review["request"]["uid"] = uid.clone().into();
        Expected { body: review.to_string(), uid, allowed }
    };
    all.into_iter().enumerate().map(expected).collect()
}

pub(crate) type Connection = BufStream<TlsStream<TcpStream>>;

/// Sends a review and reads the answer; the connection stays open.
pub(crate) async fn exchange(connection: &mut Connection, body: &str) -> std::io::Result<(u16, Vec<u8>)> {
    let head = format!(
        "POST /validate HTTP/1.1\r\nhost: webhook\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all(head.as_bytes()).await?;
    connection.write_all(body.as_bytes()).await?;
    connection.flush().await?;
    let (mut status, mut length, mut line) = (0, 0, String::new());
    loop {
        line.clear();
        if connection.read_line(&mut line).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let text = line.trim_end().to_ascii_lowercase();
        if text.is_empty() {
            break;
        } else if let Some(rest) = text.strip_prefix("http/1.1 ") {
            status = rest.split(' ').next().and_then(|code| code.parse().ok()).unwrap_or_default();
        } else if let Some(value) = text.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or_default();
        }
    }
    let mut answer = vec![0; length];
    connection.read_exact(&mut answer).await?;
    Ok((status, answer))
}

/// Whether an answer is what the review must have.
pub(crate) fn is_right(expected: &Expected, status: u16, answer: &[u8]) -> bool {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let response = &answer["response"];
    status == 200 && response["uid"] == *expected.uid && response["allowed"] == expected.allowed
}
