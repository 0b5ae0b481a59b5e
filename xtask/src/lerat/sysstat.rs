//! The same figures as the tools of the field see them: `sar` for a machine or a host's card, `pidstat` for processes, beside a cell's
//! measured steps. Where they are not installed, nothing is said.

use std::collections::BTreeSet;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

/// What is kept of the columns of `sar`.
const WANTED: [&str; 6] = ["%user", "%system", "%idle", "kbmemused", "rxkB/s", "txkB/s"];

/// Tools that watch.
pub struct Watch {
    tools: Vec<(&'static str, Child)>,
}

impl Watch {
    /// Begins to watch processes, and the card of a host.
    pub fn begin(pids: &BTreeSet<u32>, host: Option<&str>) -> Self {
        let list = pids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let mut tools = Vec::new();
        let mut start = |name, words: &[&str], host: Option<&str>| {
            let mut command = Command::new(host.map_or(words[0], |_| "ip"));
            if let Some(host) = host {
                command.args(["netns", "exec", host, words[0]]);
            }
            command.args(&words[1..]).env("LC_ALL", "C").env("S_TIME_FORMAT", "ISO");
            let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
            tools.extend(child.ok().map(|child| (name, child)));
        };
        start("sar_cpu", &["sar", "-u", "1"], None);
        start("sar_memory", &["sar", "-r", "1"], None);
        start("pidstat", &["pidstat", "-u", "-r", "-h", "-p", &list, "1"], None);
        if let Some(host) = host {
            start("sar_network", &["sar", "-n", "DEV", "1"], Some(host));
        }
        Self { tools }
    }

    /// Ends it: what each says on average of its seconds.
    pub fn end(mut self) -> Value {
        let mut found = json!({});
        for (name, mut child) in std::mem::take(&mut self.tools) {
            let _ = Command::new("kill").args(["-TERM", &child.id().to_string()]).stderr(Stdio::null()).status();
            let mut text = String::new();
            if let Some(output) = &mut child.stdout {
                let _ = std::io::Read::read_to_string(output, &mut text);
            }
            let _ = child.wait();
            let value = if name == "pidstat" { processes(&text) } else { averages(name, &text) };
            if !value.is_null() {
                found[name] = value;
            }
        }
        found
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        for (_, child) in &mut self.tools {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What `sar` says on average, by the names of its columns. Its own line of averages comes only where Ctrl-C reaches it.
fn averages(name: &str, text: &str) -> Value {
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let is_head = |row: &&Vec<&str>| row.iter().any(|word| WANTED.contains(word));
    let is_look = |row: &&Vec<&str>| row.len() > 3 && row[0].contains(':') && row[0] != "Average:" && !is_head(row);
    let is_wanted = |row: &&Vec<&str>| is_look(row) && (name != "sar_network" || row[1] == "card");
    let Some(head) = rows.iter().find(is_head) else { return Value::Null };
    let looks: Vec<&Vec<&str>> = rows.iter().filter(is_wanted).collect();
    if looks.is_empty() {
        return Value::Null;
    }
    // Heads and looks end with the same columns, and may begin differently.
    let mean = |column: usize| {
        let numbers = looks.iter().filter_map(|row| row.iter().rev().nth(column)?.parse::<f64>().ok());
        numbers.sum::<f64>() / looks.len() as f64
    };
    let columns = head.iter().rev().enumerate().filter(|(_, column)| WANTED.contains(column));
    Value::Object(columns.map(|(at, column)| ((*column).to_owned(), json!(mean(at)))).collect())
}

/// The sum of all processes that `pidstat -h` lists, on average over its looks.
fn processes(text: &str) -> Value {
    let Some(head) = text.lines().find(|line| line.starts_with('#')) else { return Value::Null };
    let column = |name: &str| head.split_whitespace().skip(1).position(|word| word == name);
    let (Some(time), Some(cpu), Some(memory)) = (column("Time"), column("%CPU"), column("RSS")) else {
        return Value::Null;
    };
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| line.starts_with(|c: char| c.is_ascii_digit()))
        .map(|line| line.split_whitespace().collect())
        .collect();
    let looks = rows.iter().filter_map(|row| row.get(time)).collect::<BTreeSet<_>>().len().max(1) as f64;
    let sum = |at: usize| rows.iter().filter_map(|row| row.get(at)?.parse::<f64>().ok()).sum::<f64>() / looks;
    json!({ "cpu_percent": sum(cpu), "rss_kib": sum(memory) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_are_made_by_columns() {
        let text = "Linux 6.1 (host) \t2026-11-18 \t_x86_64_\t(2 CPU)\n\n10:00:01        CPU     %user     %nice   %system   %iowait    %steal     %idle\n\
                    10:00:02        all     50.00      0.00      1.00      0.00      0.00     49.00\n\
                    10:00:03        all     53.00      0.00      3.00      0.00      0.00     44.00\n\
                    Average:        all     51.50      0.00      2.00      0.00      0.00     46.50\n";
        assert_eq!(averages("sar_cpu", text), json!({"%user": 51.5, "%system": 2.0, "%idle": 46.5}));
        let text = "10:00:01 IFACE rxpck/s txpck/s rxkB/s txkB/s rxcmp/s txcmp/s rxmcst/s %ifutil\n10:00:02 lo 0 0 1 2 0 0 0 0\n10:00:02 card 0 0 3.5 4.5 0 0 0 0\n";
        assert_eq!(averages("sar_network", text), json!({"rxkB/s": 3.5, "txkB/s": 4.5}));
        assert_eq!(averages("sar_cpu", ""), Value::Null);
    }

    #[test]
    fn processes_are_added_up_and_looks_averaged() {
        let text = "Linux\n\n# Time UID PID %usr %system %guest %wait %CPU CPU minflt/s majflt/s VSZ RSS %MEM Command\n\
                    10:00:02 0 7 90 0 0 0 90.0 0 0 0 9 1000 1 paceline\n10:00:02 0 8 50 0 0 0 50.0 1 0 0 9 500 1 paceline\n\
                    # Time UID PID\n10:00:03 0 7 90 0 0 0 100.0 0 0 0 9 1000 1 paceline\n10:00:03 0 8 50 0 0 0 60.0 1 0 0 9 700 1 paceline\n";
        assert_eq!(processes(text), json!({"cpu_percent": 150.0, "rss_kib": 1600.0}));
    }
}
