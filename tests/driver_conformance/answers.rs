//! The answers to questions that only a driver can answer.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Mutex, Once, PoisonError};

use crate::rig::Rig;

static ANSWERS: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

/// Notes an answer, unless the driver was told what to be.
pub(crate) fn answer(rig: &Rig, question: &str, answer: impl Into<String>) {
    if !rig.is_altered() {
        note(question, answer.into());
    }
}

/// Notes an answer that stands whatever rig there is.
pub(crate) fn note(question: &str, answer: String) {
    println!("{question}: {answer}");
    ANSWERS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(question.to_owned(), answer);
    // Tests end in any order, and nothing tells which is the last.
    static AT_EXIT: Once = Once::new();
    if std::env::args().any(|argument| argument == "--nocapture") {
        AT_EXIT.call_once(|| {
            // SAFETY: the function has the type that is called, and does not
            // unwind.
            let _ = unsafe { libc::atexit(print_table) };
        });
    }
}

extern "C" fn print_table() {
    let answers = ANSWERS.lock().unwrap_or_else(PoisonError::into_inner);
    let widest = answers.keys().map(|it| it.len()).max().unwrap_or(0);
    let mut out = io::stdout();
    // A closed pipe must not become a panic in a function that C calls.
    let _ = writeln!(out, "\nanswers of this driver");
    for (question, answer) in answers.iter() {
        let _ = writeln!(out, "  {question:widest$}  {answer}");
    }
}
