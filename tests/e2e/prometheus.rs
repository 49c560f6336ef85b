//! A real Prometheus that scrapes replicas and evaluates the alerts, and promtool.

use std::{
    fmt::Write as _,
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

use crate::harness::{Lockstep, eventually};

const RULES: &str = include_str!("../../deploy/components/monitoring/rules.yaml");
/// The job that the PodMonitor makes; rules and dashboard select by it.
pub const JOB: &str = "lockstep-system/lockstep";
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// The programs; `None` if they are not installed.
pub fn installed() -> Option<[PathBuf; 2]> {
    let found = |name: &str| {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
    };
    match (found("prometheus"), found("promtool")) {
        (Some(prometheus), Some(promtool)) => Some([prometheus, promtool]),
        _ => {
            controlplane::skip("it needs prometheus and promtool (Debian: prometheus)");
            None
        }
    }
}

/// The rules as Prometheus itself reads them, without the object of the operator around them.
pub fn rules() -> Value {
    let object: Value = serde_saphyr::from_str(RULES).expect("YAML");
    object["spec"].clone()
}

/// A directory that is removed in the end.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("prometheus-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        Self(dir)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).expect("a file");
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

/// A running Prometheus. Dropping it kills it.
pub struct Prometheus {
    child: Child,
    address: String,
    dir: Dir,
    targets: Vec<Value>,
}

impl Prometheus {
    /// Starts it with these rules. It scrapes and evaluates every second.
    pub async fn start(program: &Path, name: &str, rules: &Value) -> Self {
        let dir = Dir::new(name);
        // JSON is YAML.
        dir.write("rules.yaml", &rules.to_string());
        dir.write("targets.json", "[]");
        let config = json!({
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": JOB, "file_sd_configs": [{"files": ["targets.json"]}]}],
        });
        let config = dir.write("prometheus.yaml", &config.to_string());
        let port =
            TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
        let address = format!("127.0.0.1:{port}");
        let log = fs::File::create(dir.path().join("log")).expect("a log");
        let child = Command::new(program)
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("prometheus");
        let prometheus = Self { child, address, dir, targets: Vec::new() };
        eventually("Prometheus is ready", || async {
            prometheus.get("/-/ready").is_some_and(|answer| answer.contains(" 200 ")).then_some(())
        })
        .await;
        prometheus
    }

    /// Scrapes a replica from now on, as the only one of this cluster.
    pub fn add(&mut self, cluster: &str, replica: &Lockstep) {
        let labels =
            json!({"cluster": cluster, "namespace": "lockstep-system", "pod": format!("{cluster}-0")});
        self.targets.push(json!({"targets": [replica.ops_address()], "labels": labels}));
        // Prometheus must not read half of it.
        let new = self.dir.write("targets.new", &Value::from(self.targets.clone()).to_string());
        fs::rename(new, self.dir.path().join("targets.json")).expect("the targets");
    }

    /// The response with its head; `None` if there is none.
    fn get(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT)).ok()?;
        // With this version of HTTP, the body is not sent in chunks.
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// The `data` of an answer of its API.
    pub fn api(&self, path: &str) -> Value {
        let answer = self.get(&format!("/api/v1/{path}")).expect("Prometheus runs");
        let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
        let body: Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"));
        assert_eq!(body["status"], "success", "{path}: {body}");
        body["data"].clone()
    }

    /// The series that an expression results in.
    pub fn query(&self, expression: &str) -> Vec<Value> {
        let mut path = "query?query=".to_owned();
        for byte in expression.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => path.push(char::from(byte)),
                _ => write!(path, "%{byte:02X}").expect("a string"),
            }
        }
        self.api(&path)["result"].as_array().expect("a vector").clone()
    }

    /// The alerts that are pending or firing.
    pub fn alerts(&self) -> Vec<Value> {
        self.api("alerts")["alerts"].as_array().expect("alerts").clone()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            let last: Vec<&str> = log.lines().rev().take(20).collect();
            eprintln!("--- last lines of prometheus\n{}", last.join("\n"));
        }
    }
}
