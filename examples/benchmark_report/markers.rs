//! The places of a document that are written by the report.

use crate::error::ReportError;

/// The document with `body` between the lines `<!-- marker -->` and
/// `<!-- /marker -->`, in place of what was there.
pub(crate) fn fill(document: &str, marker: &str, body: &str) -> Result<String, ReportError> {
    let opening = format!("<!-- {marker} -->");
    let closing = format!("<!-- /{marker} -->");
    let missing = || ReportError::NoMarkers {
        marker: marker.to_owned(),
    };
    let (before, rest) = document.split_once(&opening).ok_or_else(missing)?;
    let (_, after) = rest.split_once(&closing).ok_or_else(missing)?;
    let body = body.trim();
    Ok(format!("{before}{opening}\n\n{body}\n\n{closing}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "a\n<!-- t -->\nold\n<!-- /t -->\nb\n";

    #[test]
    fn what_stood_between_the_markers_is_replaced() {
        let filled = fill(DOCUMENT, "t", "new\n").expect("the markers are there");
        assert_eq!(filled, "a\n<!-- t -->\n\nnew\n\n<!-- /t -->\nb\n");
    }

    #[test]
    fn filling_twice_changes_nothing_more() {
        let once = fill(DOCUMENT, "t", "new").expect("the markers are there");
        let twice = fill(&once, "t", "new").expect("the markers are still there");
        assert_eq!(once, twice);
    }

    #[test]
    fn a_document_without_the_markers_is_refused() {
        for document in ["", "<!-- t -->", "<!-- /t --> <!-- t -->"] {
            let error = fill(document, "t", "new").expect_err("no place");
            assert!(matches!(error, ReportError::NoMarkers { marker } if marker == "t"));
        }
    }
}
