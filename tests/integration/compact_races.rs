//! Compaction beside workers that append without the lock and rewrite in place: no line is lost. How that is known is told in race.rs.

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use crate::race::{
    Account, Put, Race, Runs, Seen, WITH_TORN_LINES, WITHOUT_TORN_LINES, assert_nothing_lost, assert_only_takes_lose,
    export_for, id, kept_before, losses, removable, removed, total,
};
use crate::test_env::{record, shortened, tell};

/// How long the workers of the great races are at work.
const LOAD: Duration = Duration::from_secs(60);
/// How long those of the others are.
const SHORT_LOAD: Duration = Duration::from_secs(8);
/// How long the takes are at work without compaction, for comparison.
const LOAD_WITHOUT: Duration = Duration::from_secs(10);
#[test]
fn a_minute_beside_producers_without_the_lock_loses_no_line_and_no_counter_falls() {
    let mut race = Race::new();
    let (mut runs, mut seen) = (Runs::default(), Seen::default());
    race.stop_two(&mut runs, &mut seen);
    race.start(&["put"; 4]);
    let before = runs.late;
    let exports = thread::scope(|scope| {
        let exporting = scope.spawn(|| export_for(LOAD, &race));
        runs.compact_for(LOAD, &race.env, &mut seen);
        exporting.join().unwrap()
    });
    let late = runs.late - before;
    let kept_open = race.generations();
    assert!(
        kept_open.contains(&"queue.gen.1".to_owned()) && kept_open.contains(&"queue.gen.2".to_owned()),
        "{kept_open:?}"
    );
    race.finish();
    race.settle(&mut runs, &mut seen, WITHOUT_TORN_LINES);
    assert_nothing_lost(&race, "without the lock");
    tell(&format!(
        "{} puts, {exports} exports, {late} lines late during the load; in all {runs:?}",
        race.count("done")
    ));
    assert!(runs.commits > 50 && late > 50 && exports > 50, "{exports} exports, {late} late lines, {runs:?}");
}

#[test]
fn a_minute_beside_takes_as_well_loses_only_what_takes_lose_by_themselves() {
    let mut race = Race::new();
    let (mut runs, mut seen) = (Runs::default(), Seen::default());
    race.env.write("queue.jsonl", kept_before());
    race.stop_two(&mut runs, &mut seen);
    let workers = ["put", "put", "put", "take"];
    race.start(&workers);
    let before = runs.late;
    let alone = thread::scope(|scope| {
        // The same workers without compaction, which is not needed to lose lines.
        let alone = scope.spawn(|| {
            let mut race = Race::new();
            race.env.write("queue.jsonl", kept_before());
            race.start(&workers);
            thread::sleep(LOAD_WITHOUT);
            race.finish();
            losses(&race.account(), &race.queue(), &Seen::default())
        });
        runs.compact_for(LOAD, &race.env, &mut seen);
        alone.join().unwrap()
    });
    let late = runs.late - before;
    race.finish();
    race.settle(&mut runs, &mut seen, WITH_TORN_LINES);

    let losses = assert_only_takes_lose(&race, &mut seen);

    tell(&format!("in {LOAD:?} with compaction {losses}; {late} lines late during the load; in all {runs:?}"));
    tell(&format!("in {LOAD_WITHOUT:?} without {alone}"));
    assert!(alone.by_others.is_empty(), "lost, but not by a take: {}", alone.by_others.join("\n"));
    assert!(alone.by_takes > 0, "takes lose nothing by themselves: nothing has been told apart");
    assert!(runs.commits > 50 && late > 50 && losses.takes > 50, "{losses}; {late} late lines, {runs:?}");
}

#[test]
fn beside_workers_that_all_take_the_lock_nothing_is_lost_at_all() {
    let mut race = Race::new();
    let (mut runs, mut seen) = (Runs::default(), Seen::default());
    race.start(&["lput", "lput", "lput", "take", "take"]);
    runs.compact_for(SHORT_LOAD, &race.env, &mut seen);
    race.finish();
    race.settle(&mut runs, &mut seen, WITHOUT_TORN_LINES);
    assert_nothing_lost(&race, "under the lock");
    let account = race.account();
    tell(&format!("{} puts, {} takes; {runs:?}", account.puts.len(), account.takes.len()));
    assert!(runs.commits > 20 && account.puts.len() > 100 && account.takes.len() > 20, "{runs:?}");
}

/// Cuts a line into pieces of the first of these puts, and so many bytes of each: the producer was killed in each but the last, and put each but
/// the first into a file that ended in the middle of a line. So it has glued them itself.
fn pieces(line: &str, puts: &[Put]) -> Option<Vec<usize>> {
    let (put, later) = puts.split_first()?;
    if line == put.line {
        return Some(vec![line.len()]);
    }
    if put.has_ended {
        return None;
    }
    let common = line.bytes().zip(put.line.bytes()).take_while(|(a, b)| a == b).count();
    (0..=common).rev().find_map(|end| {
        if end == line.len() {
            return Some(vec![end]);
        }
        let goes_on = line[end..].starts_with('{') && later.first().is_some_and(|next| next.behind_torn);
        let rest = goes_on.then(|| pieces(&line[end..], later)).flatten()?;
        Some([vec![end], rest].concat())
    })
}

#[test]
fn a_producer_killed_in_the_middle_of_lines_tears_no_others_than_its_own() {
    let mut race = Race::new();
    let (mut runs, mut seen) = (Runs::default(), Seen::default());
    // Alone: who appends to what another left torn glues to it, with compaction or without.
    race.start(&["die"]);
    runs.compact_for(SHORT_LOAD, &race.env, &mut seen);
    race.finish();
    race.settle(&mut runs, &mut seen, WITH_TORN_LINES);

    let lives = (1..).map(|life| format!("die-0-{life}"));
    race.logs.extend(lives.take_while(|log| race.env.path(format!("{log}.account")).exists()));
    let kills = race.logs.len() - 1;
    let (Account { puts, .. }, queue) = (race.account(), race.queue());
    seen.add(&queue);
    let places: HashMap<&str, usize> = puts.iter().enumerate().map(|(place, put)| (&*put.line, place)).collect();
    let mut times = vec![0; puts.len()];
    let (mut torn, mut glued, mut problems) = (0, 0, Vec::new());
    for line in queue.lines().filter(|line| id(line) != Some("ledger")) {
        if let Some(&place) = places.get(line) {
            times[place] += 1;
            continue;
        }
        let mut killed = (0..puts.len()).filter(|place| !puts[*place].has_ended);
        let found = killed.find_map(|place| Some((place, pieces(line, &puts[place..])?)));
        let Some((place, pieces)) = found else {
            problems.push(format!("glued, torn or foreign: {}", shortened(line)));
            continue;
        };
        for (piece, end) in pieces.iter().enumerate() {
            times[place + piece] += usize::from(*end == puts[place + piece].line.len());
        }
        torn += usize::from(pieces.len() == 1);
        glued += usize::from(pieces.len() > 1);
    }
    for (put, times) in puts.iter().zip(times) {
        let is_accounted_for = times == 1 || !put.has_ended || (removable(&put.line).is_some() && seen.has(&put.line));
        if times > 1 || !is_accounted_for {
            problems.push(format!("{times} times: {}", shortened(&put.line)));
        }
    }
    assert!(problems.is_empty(), "{} of {} lines:\n{}", problems.len(), puts.len(), problems.join("\n"));
    let mut found = removed(&queue);
    found += total(queue.lines().filter_map(removable));
    assert_eq!(found, seen.removable(), "what was removed or is there, and what was seen");
    tell(&format!("{kills} kills, {} puts; {torn} torn lines, {glued} glued by their producer; {runs:?}", puts.len()));
    assert!(kills > 20 && torn > 5 && runs.commits > 20, "{kills} kills, {torn} torn lines, {runs:?}");
}

#[test]
fn a_number_is_never_given_to_a_second_generation() {
    let race = Race::new();
    let (mut runs, mut seen) = (Runs::default(), Seen::default());
    for name in ["queue.gen.1", "queue.gen.2", "queue.gen.3"] {
        let old = record(name, "researcher", "done").replace("1795950000", "1600000000");
        let queue = race.queue() + &old;
        race.env.write("queue.jsonl", queue);
        runs.compact(&race.env, &mut seen);
        assert_eq!(race.generations(), [name]);
        // It is gone before the next has its number, which only the ledger still knows.
        runs.compact(&race.env, &mut seen);
        assert_eq!(race.generations(), Vec::<String>::new());
    }
}
