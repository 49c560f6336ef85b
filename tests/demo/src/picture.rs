//! A picture of the walk-through in a terminal, for the README. It uses no fonts but those of the machine that shows
//! it.

/// A command and what it printed.
pub struct Entry {
    pub command: String,
    pub output: String,
}

/// Lines are wrapped at this column.
const COLUMNS: usize = 100;
const MARGIN_COLUMNS: usize = 3;
/// The size of a character and of a line in pixels, and the space before a command.
const CHARACTER: usize = 8;
const LINE: usize = 19;
const GAP: usize = 7;
/// The height of the title bar, and the space below the last line.
const TITLE: usize = 36;
const MARGIN: usize = 16;

/// The window is dark on a light page and on a dark one.
const STYLE: &str = r##"<style>
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
.title { fill: #8b949e; text-anchor: middle }
.command { fill: #f0f6fc; font-weight: 600 }
.prompt { fill: #3fb950 }
.output { fill: #a9b4c0 }
.warning { fill: #e3b341 }
.error { fill: #ff7b72 }
</style>
"##;
const BUTTONS: [&str; 3] = ["#ff5f57", "#febc2e", "#28c840"];

/// A line of the picture: its CSS class, and its text.
type Line = (&'static str, String);

/// Draws a session.
pub fn render(session: &[Entry]) -> String {
    let (mut body, mut y) = (String::new(), TITLE);
    for entry in session {
        y += GAP;
        for (class, text) in lines(entry) {
            y += LINE;
            body += &line(class, &text, y);
        }
    }
    let (width, height) = (width(COLUMNS) + width(2 * MARGIN_COLUMNS), y + MARGIN);
    let buttons: String = BUTTONS
        .iter()
        .enumerate()
        .map(|(number, fill)| {
            format!("<circle cx=\"{}\" cy=\"18\" r=\"6\" fill=\"{fill}\"/>\n", 26 + number * 20)
        })
        .collect();
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         role=\"img\">\n\
         <title>Lockstep in a terminal</title>\n\
         <desc>{}</desc>\n\
         {STYLE}\
         <rect x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"10\" fill=\"#0d1117\" stroke=\"#3d444d\"/>\n\
         {buttons}\
         <text class=\"title\" x=\"{}\" y=\"23\">make demo</text>\n\
         {body}\
         </svg>\n",
        escape(&transcript(session)),
        width - 1,
        height - 1,
        width / 2,
    )
}

/// The lines of a command and its output, wrapped.
fn lines(entry: &Entry) -> Vec<Line> {
    let output = entry.output.lines().map(|line| (class(line), line.to_owned()));
    let lines = std::iter::once(("command", format!("$ {}", entry.command))).chain(output);
    lines.flat_map(|(class, line)| wrap(&line).into_iter().map(move |part| (class, part))).collect()
}

/// A line that ends at `y`. The length keeps columns aligned and lines inside the window, whatever the font.
fn line(class: &str, text: &str, y: usize) -> String {
    let length = width(text.chars().count());
    let text = match text.strip_prefix('$') {
        Some(command) if class == "command" => {
            format!("<tspan class=\"prompt\">$</tspan>{}", escape(command))
        }
        _ => escape(text),
    };
    format!(
        "<text class=\"{class}\" x=\"{}\" y=\"{}\" textLength=\"{length}\" lengthAdjust=\"spacingAndGlyphs\" \
         xml:space=\"preserve\">{text}</text>\n",
        width(MARGIN_COLUMNS),
        y - 5,
    )
}

fn width(characters: usize) -> usize {
    characters * CHARACTER
}

fn class(line: &str) -> &'static str {
    match line {
        line if line.starts_with("Error") => "error",
        line if line.starts_with("Warning") => "warning",
        _ => "output",
    }
}

/// The parts of a line that fit into the terminal, wrapped at a space where there is one.
fn wrap(line: &str) -> Vec<String> {
    let mut rest: Vec<char> = line.chars().collect();
    let mut parts = vec![];
    while rest.len() > COLUMNS {
        let space = rest[..=COLUMNS].iter().rposition(|character| *character == ' ');
        let next = rest.split_off(space.map_or(COLUMNS, |space| space + 1));
        parts.push(rest.iter().collect::<String>().trim_end().to_owned());
        rest = next;
    }
    parts.push(rest.iter().collect());
    parts
}

/// The session as text, for readers that do not see the picture.
fn transcript(session: &[Entry]) -> String {
    session.iter().map(|entry| format!("$ {}\n{}\n", entry.command, entry.output)).collect()
}

const ESCAPES: [(&str, &str); 3] = [("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")];

fn escape(text: &str) -> String {
    ESCAPES.iter().fold(text.to_owned(), |text, (plain, escaped)| text.replace(plain, escaped))
}

/// Replaces the age of an object at the end of a line, which differs from run to run.
pub fn without_age(output: &str) -> String {
    let lines = output.lines().map(|line| {
        let age = line.rsplit(' ').next().unwrap_or_default();
        let seconds = age.strip_suffix('s').filter(|number| number.parse::<u32>().is_ok());
        seconds.map_or_else(|| line.to_owned(), |_| format!("{}1s", &line[..line.len() - age.len()]))
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::walkthrough;

    const PICTURE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/demo.svg"));

    /// The session in a picture.
    fn session(svg: &str) -> Vec<Entry> {
        let text = svg.split_once("<desc>").unwrap().1.split_once("</desc>").unwrap().0;
        let text =
            ESCAPES.iter().rev().fold(text.to_owned(), |text, (plain, escaped)| text.replace(escaped, plain));
        let mut session: Vec<Entry> = vec![];
        for line in text.lines() {
            match line.strip_prefix("$ ") {
                Some(command) => session.push(Entry { command: command.to_owned(), output: String::new() }),
                None => {
                    let output = &mut session.last_mut().unwrap().output;
                    let end = if output.is_empty() { "" } else { "\n" };
                    *output += &format!("{end}{line}");
                }
            }
        }
        session
    }

    #[test]
    fn picture_shows_the_walkthrough() {
        let session = session(PICTURE);
        let steps: Vec<_> = walkthrough::steps().into_iter().filter(|step| step.pictured).collect();
        let commands: Vec<&str> = steps.iter().map(|step| step.command).collect();
        let shown: Vec<&str> = session.iter().map(|entry| entry.command.as_str()).collect();
        assert_eq!(shown, commands, "run `make picture`");
        for (step, entry) in steps.iter().zip(&session) {
            assert!(step.expect.holds(&entry.output), "{}: run `make picture`", step.command);
        }
        assert_eq!(
            render(&session),
            PICTURE,
            "what is drawn is not what the description says: run `make picture`"
        );
    }

    #[test]
    fn long_lines_are_wrapped_and_markup_is_escaped() {
        let words = format!("{} <b>&", "x".repeat(COLUMNS));
        assert_eq!(wrap(&words), ["x".repeat(COLUMNS).as_str(), "<b>&"]);
        assert_eq!(wrap(&"x".repeat(COLUMNS + 1)), ["x".repeat(COLUMNS).as_str(), "x"]);
        let svg = render(&[Entry { command: "cat".into(), output: words.clone() }]);
        assert!(svg.contains(">&lt;b&gt;&amp;</text>"), "{svg}");
        assert_eq!(session(&svg)[0].output, words);
    }

    #[test]
    fn age_is_the_same_in_every_picture() {
        assert_eq!(without_age("NAME   AGE\na      12s\nthis has it"), "NAME   AGE\na      1s\nthis has it");
    }
}
