//! Text into HTML, safely. Everything that came from a log passes through [`escape`] or [`script_json`].

use paceline_system::printable::{printable_json, printable_lines};
use serde::Serialize;

/// `text` with every character that HTML could take for its own replaced; safe in content and in quoted attributes. What
/// would turn the text around or is not seen is shown as an escape, as on a terminal.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in printable_lines(text).chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// `value` as JSON for a script element, in which `</script>` and `<!--` cannot occur.
pub(crate) fn script_json(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).expect("plain data has a JSON form");
    printable_json(&json).replace('<', "\\u003c")
}

/// A titled part of the page.
pub(crate) fn section(id: &str, title: &str, body: &str) -> String {
    format!("<section id=\"{id}\">\n<h2>{title}</h2>\n{body}</section>\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_text_stays_text() {
        assert_eq!(escape(r#"<b a="1" c='2'>&"#), "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;");
        assert_eq!(escape("a\u{1b}[31m\tb\n"), "a\\u{1b}[31m\tb\n");
        assert_eq!(escape("\u{202e}gpj"), "\\u{202e}gpj");
    }

    #[test]
    fn a_name_cannot_end_the_script() {
        assert_eq!(script_json(&"</script><!--"), r#""\u003c/script>\u003c!--""#);
    }
}
