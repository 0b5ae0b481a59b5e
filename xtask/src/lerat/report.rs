//! The report: tables, figures, claims, and the raw numbers beside it.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use super::cells::{BATCHES, Cell, ONE_CORE, PROCESSES, Place, Side, TWO_NODES, TWO_THREADS, WORKS, Work};
use super::claims;
use super::figure::Bars;
use super::results::{Results, Step, gradient_bytes, sent_bytes, step_of};

/// Writes lerat.md, lerat.json, lerat.csv and the figures.
pub fn write(results: &Results, folder: &Path, (quick, augmented): (bool, bool)) -> Result<()> {
    let mut text = head(results, quick, augmented);
    text += &judged(results);
    for work in WORKS {
        text += &setups(results, work);
        std::fs::write(folder.join(format!("lerat-{}.svg", work.model)), speedups(results, work).svg())?;
    }
    text += &nodes(results);
    text += &places(results);
    text += &torch(results);
    text += &tools(results);
    text += &bounds();
    std::fs::write(folder.join("lerat-bytes.svg"), bytes(results).svg())?;
    std::fs::write(folder.join("lerat.md"), text)?;
    let all: Vec<&Value> = results.all().map(|(_, found)| found).collect();
    let lines: Vec<String> = all.iter().map(|found| found.to_string()).collect();
    std::fs::write(folder.join("lerat.json"), format!("[\n{}\n]\n", lines.join(",\n")))?;
    Ok(std::fs::write(folder.join("lerat.csv"), csv(results))?)
}

fn head(results: &Results, quick: bool, augmented: bool) -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")).and_then(|line| line.split_once(": "));
    let cpu = cpu.map_or("an unknown processor", |(_, name)| name.trim());
    let quick = if quick { "\n**Made with `--quick`: one step a cell, and nothing to be believed.**\n" } else { "" };
    let set = if augmented {
        "each image thirty times, with augmentation written out"
    } else {
        "each image thirty times, as it is"
    };
    format!(
        "# From one node to many, scaled down to two cores\n{quick}\n\
         The experiment of Lerat et al. on two cores of {cpu}: ComplexSmall is vgg16 with 600 photographs of 3 classes, SimpleBig is alexnet with 18,000 ({set}). \
         Scaled to 224×224, mirrored by chance, normalised; SGD, η = 0.001, momentum 0.9, cross-entropy. Made by `cargo x lerat`; {} cells, whose raw numbers are in \
         [lerat.json](lerat.json) and [lerat.csv](lerat.csv).\n\n\
         **Epochs are extrapolated**: an epoch is its number of steps times the median of a few measured steps, without the first one; loading is in it, evaluation and \
         saving are not. `~` marks a batch that was not measured at all: it is on the line through two smaller ones; there is none for hosts, which wait for their link \
         as long as computing is shorter. Every cell was measured once, so differences of a few percent between cells are within what two measurements of one cell differ by.\n",
        results.all().count()
    )
}

fn judged(results: &Results) -> String {
    let mut text = "\n## The claims\n\n".to_owned();
    for claims::Judged { claim, verdict, numbers } in claims::judge(results) {
        let _ = writeln!(text, "**{claim}: {verdict}.**\n");
        numbers.iter().for_each(|line| {
            let _ = writeln!(text, "- {line}");
        });
        text.push('\n');
    }
    text
}

fn epoch(work: Work, batch: u32, step: Step) -> f64 {
    f64::from(work.images.div_ceil(batch)) * step.median
}

fn spread(step: Step) -> String {
    match step.measured {
        true => format!("{:.3} ({:.3}–{:.3})", step.median, step.least, step.most),
        false => format!("~{:.2}", step.median),
    }
}

/// All set-ups of a work on one node and on two.
fn setups(results: &Results, work: Work) -> String {
    let mut text = format!(
        "\n## {}: {}, {} images\n\n![speed-up over one core](lerat-{}.svg)\n\n\
         | set-up | batch | step, s (least–most) | epoch, s | speed-up over one core | cores busy | memory, MiB |\n|---|---|---|---|---|---|---|\n",
        work.name, work.model, work.images, work.model
    );
    for batch in BATCHES {
        for setup in results.setups() {
            let Some(step) = results.step(work, batch, setup, Side::Paceline) else { continue };
            let cell = results.cell(work, batch, setup);
            let number = |name: &str| cell.and_then(|cell| cell[name].as_f64());
            let busy = number("cpu_busy").map_or("–".into(), |busy| format!("{:.0}%", 100.0 * busy));
            let memory = number("memory_bytes").map_or("–".into(), |bytes| format!("{:.0}", bytes / 1048576.0));
            let speedup = results.speedup(work, batch, setup).map_or("–".into(), |speedup| format!("{speedup:.2}×"));
            let tilde = if step.measured { "" } else { "~" };
            let _ = writeln!(
                text,
                "| {setup} | {batch} | {} | {tilde}{:.0} | {speedup} | {busy} | {memory} |",
                spread(step),
                epoch(work, batch, step)
            );
        }
    }
    text
}

fn speedups(results: &Results, work: Work) -> Bars<'static> {
    let title =
        if work.model == "vgg16" { "vgg16: times as fast as one core" } else { "alexnet: times as fast as one core" };
    let of = |setup: &str| BATCHES.map(|batch| results.speedup(work, batch, setup)).to_vec();
    let setups = results.setups().into_iter().filter(|&setup| setup != ONE_CORE);
    let groups =
        setups.map(|setup| (setup.to_owned(), of(setup))).filter(|(_, values)| values.iter().any(Option::is_some));
    Bars {
        title,
        series: BATCHES.map(|batch| format!("batch {batch}")).to_vec(),
        groups: groups.collect(),
        line: Some(1.0),
    }
}

fn nodal(results: &Results) -> impl Iterator<Item = &(Cell, Value)> {
    results.all().filter(|(cell, found)| cell.nodes > 1 && cell.place == Place::Local && sent_bytes(found).is_some())
}

fn bytes(results: &Results) -> Bars<'static> {
    let of = |(cell, found): &(Cell, Value)| {
        let share = sent_bytes(found).zip(gradient_bytes(found)).map(|(sent, all)| sent / all);
        (format!("{} b{} {}", cell.work.model, cell.batch, cell.setup), vec![share])
    };
    let groups = nodal(results).map(of).collect();
    Bars {
        title: "bytes out of a node in a step ÷ S",
        series: vec!["measured at the card".into()],
        groups,
        line: Some(1.0),
    }
}

fn nodes(results: &Results) -> String {
    let mut text = "\n## Network\n\n![bytes out of a node](lerat-bytes.svg)\n\nHosts are network namespaces with a core each; their cables let 1 Gbit/s through. \
        Bytes are those of the card, with the headers that it adds; S is the size of all gradients.\n\n\
        | work | batch | set-up | S, MB | out of a node, MB a step | ÷ S | Mbit/s, on average |\n|---|---|---|---|---|---|---|\n"
        .to_owned();
    for (cell, found) in nodal(results) {
        let (Some(sent), Some(all), Some(step)) = (sent_bytes(found), gradient_bytes(found), step_of(found)) else {
            continue;
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.0} | {:.0} | {:.2} | {:.0} |",
            cell.work.name,
            cell.batch,
            cell.setup,
            all / 1e6,
            sent / 1e6,
            sent / all,
            8.0 * sent / step.median / 1e6
        );
    }
    text + "\nFour nodes of a core each do not fit two cores: computing would take turns, and their times would say nothing. They are left out.\n"
}

fn places(results: &Results) -> String {
    let mut text = "\n## Where the samples are\n\nA shared mount is the same folder bound to another place: on one machine it costs what a local copy does, and shows only that \
        it works. Over the link, a third host lends the files (`paceline data serve`), and every file crosses the 1 Gbit/s cable of whoever reads it.\n\n\
        | work | batch | set-up | samples | step, s (least–most) | waiting for data, s a step | into a node, MB a step |\n|---|---|---|---|---|---|---|\n"
        .to_owned();
    for (cell, _) in results.all().filter(|(cell, _)| cell.place == Place::Shared) {
        for setup in [TWO_NODES, TWO_THREADS] {
            for place in [Place::Local, Place::Shared, Place::Remote] {
                let Some(found) = results.at(cell.work, cell.batch, setup, Side::Paceline, place) else { continue };
                let Some(step) = step_of(found) else { continue };
                let phases: Vec<f64> = found["phases"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(|phases| phases["data"].as_f64())
                    .collect();
                let waits = phases.iter().sum::<f64>() / phases.len().max(1) as f64;
                let received = found["host_bytes"][0][0].as_f64().zip(found["window_steps"].as_f64());
                let received = received.map_or("–".into(), |(bytes, steps)| format!("{:.1}", bytes / steps / 1e6));
                let (work, batch, place) = (cell.work.name, cell.batch, place.name());
                let _ = writeln!(
                    text,
                    "| {work} | {batch} | {setup} | {place} | {} | {waits:.3} | {received} |",
                    spread(step)
                );
            }
        }
    }
    text
}

fn torch(results: &Results) -> String {
    let version = results.all().find_map(|(_, found)| found["torch"].as_str()).unwrap_or("none was there");
    let mut text = format!(
        "\n## PyTorch on the same cores\n\nDDP over gloo, channels_last, the same files through torchvision's transforms with a loader process for each rank; version {version}.\n\n\
         | work | batch | set-up | PyTorch, s a step (least–most) | Paceline | Paceline's speed ÷ PyTorch's |\n|---|---|---|---|---|---|\n"
    );
    for work in WORKS {
        for batch in work.measured {
            for setup in [TWO_THREADS, PROCESSES] {
                let Some(peer) = results.at(work, *batch, setup, Side::Torch, Place::Local).and_then(step_of) else {
                    continue;
                };
                let Some(own) = results.step(work, *batch, setup, Side::Paceline) else { continue };
                let ratio = peer.median / own.median;
                let _ = writeln!(
                    text,
                    "| {} | {batch} | {setup} | {} | {} | {ratio:.2} |",
                    work.name,
                    spread(peer),
                    spread(own)
                );
            }
        }
    }
    text
}

/// What /proc says beside what the tools of the field say.
fn tools(results: &Results) -> String {
    let mut text = "\n## Beside `sar` and `pidstat`\n\nFrom the first counted step to the last. `sar` sees the whole machine, `pidstat` the processes of the cell.\n\n\
        | cell | cores busy by /proc | by pidstat | machine busy by sar | memory by /proc (shared once), MiB | by pidstat (shared each), MiB | out by /proc, Mbit/s | by sar |\n\
        |---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for (cell, found) in results.all() {
        let tools = &found["tools"];
        let Some(idle) = tools["sar_cpu"]["%idle"].as_f64() else { continue };
        let show =
            |number: Option<f64>, digits: usize| number.map_or("–".into(), |number| format!("{number:.digits$}"));
        let cores = if cell.nodes > 1 { 2.0 } else { cell.cores.split(',').count() as f64 };
        let window = found["window_s"].as_f64();
        let sent = found["host_bytes"][0][1].as_f64().zip(window).map(|(bytes, seconds)| 8.0 * bytes / seconds / 1e6);
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.0}% | {} | {} | {} | {} |",
            cell.name(),
            show(found["cpu_busy"].as_f64().map(|busy| 100.0 * busy), 0) + "%",
            show(tools["pidstat"]["cpu_percent"].as_f64().map(|percent| percent / cores), 0) + "%",
            100.0 - idle,
            show(found["memory_bytes"].as_f64().map(|bytes| bytes / 1048576.0), 0),
            show(tools["pidstat"]["rss_kib"].as_f64().map(|kib| kib / 1024.0), 0),
            show(sent, 0),
            show(tools["sar_network"]["txkB/s"].as_f64().map(|kilobytes| 8.0 * kilobytes * 1024.0 / 1e6), 0)
        );
    }
    text
}

/// What this report cannot say.
fn bounds() -> String {
    "\n## What this cannot say\n\n\
     - The study had CPUs of many cores, GPUs and up to four nodes; here are two cores. A node of one core has no choice of set-ups, so \"each node chooses for itself\" is not tried.\n\
     - Its baselines (629.73 and 879.38 s on CPUs, 34.25 and 121.82 s on GPUs) are of other machines and are not compared.\n\
     - Both hosts share one memory and its bandwidth, and the kernel that shapes the link computes on the same cores.\n\
     - The loader's thread has no core of its own: where both cores compute, decoding takes from them.\n"
        .to_owned()
}

fn csv(results: &Results) -> String {
    let mut text = "cell,work,model,batch,setup,side,samples,nodes,step_s,least_s,most_s,epoch_s,cpu_busy,memory_bytes,sent_bytes_per_step\n".to_owned();
    for (cell, found) in results.all() {
        let Some(step) = step_of(found) else { continue };
        let number = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
        let side = if cell.side == Side::Torch { "torch" } else { "paceline" };
        let _ = writeln!(
            text,
            "{},{},{},{},\"{}\",{side},{},{},{},{},{},{},{},{},{}",
            cell.name(),
            cell.work.name,
            cell.work.model,
            cell.batch,
            cell.setup,
            cell.place.name(),
            cell.nodes,
            step.median,
            step.least,
            step.most,
            epoch(cell.work, cell.batch, step),
            number(found["cpu_busy"].as_f64()),
            number(found["memory_bytes"].as_f64()),
            number(sent_bytes(found))
        );
    }
    text
}
