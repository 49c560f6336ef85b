//! Fuzzing: each target has a corpus in `tests/corpora` and a check that takes any bytes.
//!
//! `cargo test` tries every file of the corpus, and then random mutations for a bounded time: `LOCKSTEP_FUZZ_SECONDS`
//! sets for how long, `LOCKSTEP_FUZZ_SEED` repeats one input. With `make fuzz`, libFuzzer chooses the inputs instead,
//! by the code that they reach.

#[cfg(test)]
mod annotated_namespace;
#[cfg(test)]
mod annotated_source;
#[cfg(test)]
mod ca_secret;
#[cfg(test)]
mod selector;
#[cfg(test)]
mod texts;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use fastrand::Rng;

/// How long random inputs are tried for, unless `LOCKSTEP_FUZZ_SECONDS` says otherwise.
const DEFAULT_SECONDS: u64 = 2;
/// No input may take longer, on a busy machine and without optimisation. What grows faster than the input takes
/// minutes.
const MAX_TIME: Duration = Duration::from_secs(20);
/// Of so many mutated inputs, some must be accepted and some refused.
const ENOUGH_INPUTS: u64 = 500;
/// A longer input takes as much time as many short ones, so it is chosen once in so many times.
const MAX_SHORT_BYTES: usize = 4096;
const LONG_ONE_IN: u32 = 50;
/// How much of an input is printed.
const MAX_SHOWN_BYTES: usize = 4000;

pub struct Target {
    /// The name of its corpus.
    pub name: &'static str,
    /// What mutations put into inputs, apart from what is in the corpus.
    pub words: &'static [&'static str],
    /// Inputs that are too long to be stored; the name says whether they are accepted.
    pub made: Vec<(&'static str, Vec<u8>)>,
}

impl Target {
    /// Tries inputs. The check says whether the input was accepted, and panics where a property does not hold.
    pub fn run(self, mut check: impl FnMut(&[u8]) -> bool) {
        if cfg!(fuzzing) {
            return self.cover(check);
        }
        let corpus = self.corpus();
        let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
        let only = number("LOCKSTEP_FUZZ_SEED");
        if only.is_none() {
            for (name, bytes) in &corpus {
                let input = Input { name: name.clone(), bytes: bytes.clone() };
                assert_eq!(input.try_with(&mut check), expectation(name), "is it accepted? {input}");
            }
        }
        let texts = Corpus::new(corpus);
        let first = only.unwrap_or_else(|| fastrand::u64(..));
        let (start, mut tried, mut accepted) = (Instant::now(), 0, 0);
        let time = Duration::from_secs(number("LOCKSTEP_FUZZ_SECONDS").unwrap_or(DEFAULT_SECONDS));
        while tried == 0 || (only.is_none() && start.elapsed() < time) {
            let input = self.mutated(first.wrapping_add(tried), &texts);
            accepted += u64::from(input.try_with(&mut check));
            tried += 1;
        }
        println!("{}: {tried} inputs from seed {first}, {accepted} of them accepted", self.name);
        let both = accepted > 0 && accepted < tried;
        assert!(
            tried < ENOUGH_INPUTS || both,
            "{}: some mutated inputs are accepted, some are not",
            self.name
        );
    }

    /// libFuzzer chooses the inputs of the target that `LOCKSTEP_FUZZ_TARGET` names. The others end at once.
    #[cfg(fuzzing)]
    fn cover(&self, check: impl FnMut(&[u8]) -> bool) {
        if std::env::var("LOCKSTEP_FUZZ_TARGET").as_deref() == Ok(self.name) {
            let check = std::panic::AssertUnwindSafe(std::cell::RefCell::new(check));
            bolero::check!().for_each(move |input: &[u8]| {
                (check.borrow_mut())(input);
            });
        }
    }

    #[cfg(not(fuzzing))]
    fn cover(&self, _check: impl FnMut(&[u8]) -> bool) {}

    /// Every file, by name, and the inputs that are made.
    fn corpus(&self) -> Vec<(String, Vec<u8>)> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpora").join(self.name);
        let files =
            fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        let stored = files.iter().map(|file| {
            (file.file_name().unwrap().to_string_lossy().into_owned(), fs::read(file).expect("a file"))
        });
        let made = self.made.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone()));
        stored.chain(made).collect()
    }

    fn mutated(&self, seed: u64, corpus: &Corpus) -> Input {
        let mut rng = Rng::with_seed(seed);
        let mut bytes = corpus.choice(&mut rng);
        for _ in 0..rng.usize(0..5) {
            self.mutate(&mut bytes, corpus, &mut rng);
        }
        Input { name: format!("LOCKSTEP_FUZZ_SEED={seed}"), bytes }
    }

    fn mutate(&self, body: &mut Vec<u8>, corpus: &Corpus, rng: &mut Rng) {
        if body.is_empty() {
            return;
        }
        let at = rng.usize(..body.len());
        let tokens = tokens(body);
        // Prefer strings and words: most other tokens are punctuation.
        let is_word =
            |(start, _): &&(usize, usize)| body[*start] == b'"' || body[*start].is_ascii_alphanumeric();
        let words: Vec<_> = tokens.iter().filter(is_word).copied().collect();
        let from = if words.is_empty() || rng.bool() { &tokens } else { &words };
        let (start, end) = from[rng.usize(..from.len())];
        let oddity = |rng: &mut Rng| {
            let common = self.words.is_empty() || rng.u32(..3) == 0;
            *rng.choice(if common { ODDITIES } else { self.words }).unwrap_or(&"")
        };
        match rng.u32(..13) {
            0 => body[at] ^= 1 << rng.u32(..8),
            1 => body[at] = rng.u8(..),
            2 => body.truncate(at),
            3 => drop(body.splice(start..start, oddity(rng).bytes())),
            4 => drop(body.drain(start..end)),
            5 => {
                let token = body[start..end].to_vec();
                drop(body.splice(end..end, token));
            }
            6 | 7 => drop(body.splice(start..end, oddity(rng).bytes())),
            8 => {
                // The rest of another input.
                let other = corpus.choice(rng);
                let from = rng.usize(..=other.len());
                body.truncate(at);
                body.extend_from_slice(&other[from..]);
            }
            9 => {
                // One token in place of another.
                let (from, to) = tokens[rng.usize(..tokens.len())];
                let token = body[from..to].to_vec();
                drop(body.splice(start..end, token));
            }
            10 => {
                // A duplicate field of JSON.
                let fields = ["\"metadata\":{}", "\"object\":null", "\"uid\":\"x\"", "\"hush\":1"];
                let field = format!("{},", rng.choice(fields).unwrap_or(""));
                if let Some(open) = body[..=at].iter().rposition(|byte| *byte == b'{') {
                    drop(body.splice(open + 1..open + 1, field.bytes()));
                }
            }
            11 => {
                let depth = rng.usize(..2000);
                let (open, close) = *rng.choice(&[("[", "]"), ("{\"a\":", "}")]).unwrap_or(&("[", "]"));
                let nested = format!("{}1{}", open.repeat(depth), close.repeat(depth));
                drop(body.splice(start..end, nested.bytes()));
            }
            _ => {
                let fillers = [" ", "\n", "hush", "\\u0041", "ü", ",", "x", "*", "a,"];
                let filler = rng.choice(fillers).unwrap_or(" ").repeat(rng.usize(..300));
                drop(body.splice(at..at, filler.bytes()));
            }
        }
    }
}

/// What mutations begin with.
struct Corpus {
    short: Vec<Vec<u8>>,
    long: Vec<Vec<u8>>,
}

impl Corpus {
    fn new(inputs: Vec<(String, Vec<u8>)>) -> Self {
        let inputs = inputs.into_iter().map(|(_, bytes)| bytes);
        let (short, long) = inputs.partition(|bytes| bytes.len() <= MAX_SHORT_BYTES);
        Self { short, long }
    }

    fn choice(&self, rng: &mut Rng) -> Vec<u8> {
        let long = !self.long.is_empty() && rng.u32(..LONG_ONE_IN) == 0;
        rng.choice(if long { &self.long } else { &self.short }).cloned().unwrap_or_default()
    }
}

/// One input, which is printed when the test fails.
struct Input {
    name: String,
    bytes: Vec<u8>,
}

impl Input {
    fn try_with(&self, check: &mut impl FnMut(&[u8]) -> bool) -> bool {
        let start = Instant::now();
        let accepted = check(&self.bytes);
        assert!(start.elapsed() < MAX_TIME, "{:?} for {self}", start.elapsed());
        accepted
    }
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.bytes[..self.bytes.len().min(MAX_SHOWN_BYTES)].escape_ascii();
        write!(f, "{}, {} bytes: {shown}", self.name, self.bytes.len())
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{self}");
        }
    }
}

/// The name of a file in a corpus says whether it is accepted.
fn expectation(name: &str) -> bool {
    match name.split('-').next() {
        Some("accepted") => true,
        Some("refused") => false,
        _ => panic!("{name}: the name of an input starts with `accepted-` or `refused-`"),
    }
}

/// Where tokens begin and end: strings of JSON, words, and all other bytes.
fn tokens(body: &[u8]) -> Vec<(usize, usize)> {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < body.len() {
        let start = at;
        at += match body[at] {
            b'"' => {
                let mut end = at + 1;
                while end < body.len() && body[end] != b'"' {
                    end += if body[end] == b'\\' { 2 } else { 1 };
                }
                end.min(body.len() - 1) + 1 - at
            }
            byte if is_word(&byte) => body[at..].iter().take_while(|byte| is_word(byte)).count(),
            _ => 1,
        };
        tokens.push((start, at));
    }
    tokens
}

/// What has broken parsers before.
const ODDITIES: &[&str] = &[
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "0",
    "-1",
    "-0",
    "1e999",
    "1e-999",
    "2147483647",
    "-2147483648",
    "18446744073709551616",
    "9999999999999999999999",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"\\udc00\\ud800\"",
    "\"\u{202e}\u{feff}\"",
    "\"\\n\\r\\t\"",
    "\"é\u{10ffff}\"",
    "\u{feff}",
    "\u{a0}",
    "\u{b}",
    "NaN",
    "'a'",
    "/*hush*/",
    "\u{0}",
    "*",
    "!",
    ",",
    "=",
    ".",
    "..",
    "a=b=c,,=",
    "9999-12-31T23:59:59Z",
    "-009999-01-01T00:00:00Z",
    "0001-01-01T00:00:00Z",
];

/// An input for targets with several texts: `name: text` a line. In a text, `\n` is a line feed.
pub fn fields(input: &[u8]) -> Option<Vec<(String, String)>> {
    let text = std::str::from_utf8(input).ok()?;
    let fields = text.lines().filter_map(|line| line.split_once(": "));
    Some(fields.map(|(name, value)| (name.to_owned(), value.replace("\\n", "\n"))).collect())
}
