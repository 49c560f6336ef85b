//! A real Chromium without a window, driven through chromedriver with a few WebDriver calls.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

use k8s_openapi::ByteString;
use serde_json::{Value, json};

use crate::harness::{eventually, within};

/// How long Chromium may take to show something on a busy machine.
const PAGE: Duration = Duration::from_secs(30);
/// How long Chromium may take for one command on a busy machine.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Keys that have no character.
pub const RIGHT: &str = "\u{e014}";
pub const DOWN: &str = "\u{e015}";
pub const ENTER: &str = "\u{e007}";
pub const ESCAPE: &str = "\u{e00c}";

pub struct Browser {
    driver: Child,
    /// Chromedriver stops when nobody reads what it prints.
    _output: BufReader<ChildStdout>,
    port: u16,
    session: String,
    profile: PathBuf,
}

impl Browser {
    /// Starts a browser with a window of this size; `None` if there is none on this machine.
    pub fn start(width: u32, height: u32) -> Option<Self> {
        let found = |name: &str| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
        };
        let (Some(chromium), Some(chromedriver)) = (found("chromium"), found("chromedriver")) else {
            controlplane::skip("it needs chromium and chromedriver (Debian: chromium, chromium-driver)");
            return None;
        };
        let mut driver = Command::new(chromedriver);
        let mut driver = driver
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver");
        let mut output = BufReader::new(driver.stdout.take().expect("its output"));
        let port = loop {
            let mut line = String::new();
            assert!(output.read_line(&mut line).expect("its output") > 0, "chromedriver ends");
            if let Some((_, port)) = line.trim().trim_end_matches('.').split_once("successfully on port ") {
                break port.parse().expect("a port");
            }
        };
        let profile = std::env::temp_dir().join(format!("lockstep-chromium-{}-{port}", std::process::id()));
        let mut browser = Self { driver, _output: output, port, session: String::new(), profile };
        let mut flags: Vec<String> = [
            "headless",
            "no-sandbox",
            "disable-gpu",
            "disable-quic",
            "no-first-run",
            "disable-sync",
            "disable-background-networking",
            "disable-component-update",
            "disable-dev-shm-usage",
            "hide-scrollbars",
        ]
        .map(|flag| format!("--{flag}"))
        .to_vec();
        flags.push(format!("--user-data-dir={}", browser.profile.display()));
        let options = json!({"binary": chromium, "args": flags});
        let capabilities = json!({"alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"},
        }});
        let started = browser.call("POST", "/session", &json!({"capabilities": capabilities}));
        browser.session = started["sessionId"].as_str().expect("a session").to_owned();
        browser.resize(width, height, 1.0, false);
        Some(browser)
    }

    pub fn resize(&self, width: u32, height: u32, scale: f64, mobile: bool) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile});
        self.devtools("Emulation.setDeviceMetricsOverride", &size);
    }

    pub fn dark(&self, dark: bool) {
        let value = if dark { "dark" } else { "light" };
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": value}]});
        self.devtools("Emulation.setEmulatedMedia", &features);
    }

    pub fn open(&self, url: &str) {
        self.command("POST", "/url", &json!({"url": url}));
    }

    /// Runs the body of a function in the page, and returns its result.
    pub fn run(&self, script: &str) -> Value {
        self.command("POST", "/execute/sync", &json!({"script": script, "args": []}))
    }

    /// The text of the elements that a selector finds.
    pub fn text(&self, selector: &str) -> String {
        let all = format!(
            "return [...document.querySelectorAll({selector:?})].map((e) => e.innerText).join('\\n')"
        );
        self.run(&all).as_str().unwrap_or_default().to_owned()
    }

    /// Waits until the elements that a selector finds contain a text.
    pub async fn wait_text(&self, selector: &str, text: &str) {
        let found = || async { self.text(selector).contains(text).then_some(()) };
        let what = format!("`{text}` in {selector} within {PAGE:?}");
        if controlplane::poll(PAGE, found).await.is_none() {
            panic!("{what}; it has: {}\nthe log of the page: {}", self.text(selector), self.log());
        }
    }

    /// Waits until an expression is true in the page.
    pub async fn wait_true(&self, expression: &str) {
        let script = format!("return Boolean({expression})");
        within(PAGE, eventually(expression, || async { (self.run(&script) == true).then_some(()) })).await;
    }

    pub fn press(&self, keys: &[&str]) {
        let press =
            |key: &&str| [json!({"type": "keyDown", "value": key}), json!({"type": "keyUp", "value": key})];
        let actions: Vec<Value> = keys.iter().flat_map(press).collect();
        self.command(
            "POST",
            "/actions",
            &json!({"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}),
        );
    }

    /// What the page has logged: errors, and violations of its Content-Security-Policy.
    pub fn log(&self) -> Value {
        self.command("POST", "/se/log", &json!({"type": "browser"}))
    }

    pub fn screenshot(&self, file: &Path) {
        let image: ByteString =
            serde_json::from_value(self.command("GET", "/screenshot", &Value::Null)).expect("an image");
        std::fs::write(file, image.0).expect("a file for the image");
    }

    fn devtools(&self, method: &str, params: &Value) {
        self.command("POST", "/goog/cdp/execute", &json!({"cmd": method, "params": params}));
    }

    fn command(&self, method: &str, path: &str, body: &Value) -> Value {
        self.call(method, &format!("/session/{}{path}", self.session), body)
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        self.try_call(method, path, body).unwrap_or_else(|error| panic!("{method} {path}: {error}"))
    }

    fn try_call(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n{body}",
            self.port,
            body.len()
        );
        // Chromedriver leaves the connection open, so the length says where the answer ends.
        let exchange = || -> std::io::Result<(String, Vec<u8>)> {
            let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
            stream.set_read_timeout(Some(COMMAND_TIMEOUT))?;
            stream.write_all(request.as_bytes())?;
            let mut answer = BufReader::new(stream);
            let mut head = String::new();
            while answer.read_line(&mut head)? > 2 {}
            let head = head.to_ascii_lowercase();
            let length =
                head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
            let mut body = vec![0; length.unwrap_or_default()];
            answer.read_exact(&mut body)?;
            Ok((head, body))
        };
        let (head, body) = exchange().map_err(|error| error.to_string())?;
        let body: Value = serde_json::from_slice(&body).map_err(|error| format!("{error}: {head}"))?;
        if head.starts_with("http/1.1 200") {
            Ok(body["value"].clone())
        } else {
            Err(body["value"]["message"].to_string())
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Chromium ends with its session.
        drop(self.try_call("DELETE", &format!("/session/{}", self.session), &Value::Null));
        drop(self.driver.kill());
        drop(self.driver.wait());
        drop(std::fs::remove_dir_all(&self.profile));
    }
}
