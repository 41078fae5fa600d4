//! The results as plots. The sizes, thread counts and rates are evenly spaced,
//! as the tables have them; costs are logarithmic.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

use crate::error::ReportError;
use crate::measured::{ALONE, Group, HIT, Measured};
use crate::tables::{in_order, rate_name, size, time};

const PICTURE: (u32, u32) = (900, 480);
const LEGEND_WIDTH: u32 = 190;
const LEGEND_LINE: i32 = 20;
/// Of the lines that have no colour of their own; all dark enough for a thin
/// line on white.
const COLOURS: [RGBColor; 9] = [
    RGBColor(31, 119, 180),
    RGBColor(44, 130, 44),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(227, 100, 180),
    RGBColor(110, 110, 110),
    RGBColor(170, 150, 20),
    RGBColor(20, 170, 190),
    RGBColor(230, 120, 20),
];
const FONT: &str = "sans-serif";

/// One line for each contestant, over the same columns.
struct Plot {
    file: &'static str,
    title: &'static str,
    x: &'static str,
    columns: Vec<String>,
    lines: Vec<Line>,
}

struct Line {
    contestant: String,
    /// A cost in nanoseconds for each column, where there is one.
    costs: Vec<Option<f64>>,
}

/// Draws all plots into `directory`.
pub(crate) fn draw(measured: &Measured, directory: &Path) -> Result<(), ReportError> {
    let plots = [
        by_size(measured, HIT, "lookup.svg", "A lookup (hit)"),
        by_size(
            measured,
            ALONE,
            "publish.svg",
            "One publish, no other thread",
        ),
        by_threads(measured),
        beside_a_writer(measured),
    ];
    for plot in plots {
        let path = directory.join(plot.file);
        plot.draw(&path).map_err(|error| ReportError::Plot {
            path,
            error: error.to_string(),
        })?;
    }
    Ok(())
}

fn by_size(measured: &Measured, group: Group, file: &'static str, title: &'static str) -> Plot {
    let sizes = measured.sizes(group);
    let lines = measured
        .contestants(group)
        .into_iter()
        .map(|contestant| Line {
            contestant: contestant.to_owned(),
            costs: sizes
                .iter()
                .map(|&n| measured.optional(group, contestant, n))
                .collect(),
        });
    Plot {
        file,
        title,
        x: "regions",
        columns: sizes.iter().map(|&n| size(n)).collect(),
        lines: lines.collect(),
    }
}

fn by_threads(measured: &Measured) -> Plot {
    let rows = &measured.contention.sharing;
    let counts = in_order(rows.iter().map(|row| row.threads));
    let contestants = in_order(rows.iter().map(|row| &row.contestant));
    let lines = contestants.into_iter().map(|contestant| Line {
        contestant: contestant.clone(),
        costs: counts
            .iter()
            .map(|&threads| measured.shared(contestant, threads).ok())
            .collect(),
    });
    Plot {
        file: "threads.svg",
        title: "A lookup, on each of several threads",
        x: "threads",
        columns: counts.iter().map(usize::to_string).collect(),
        lines: lines.collect(),
    }
}

fn beside_a_writer(measured: &Measured) -> Plot {
    let rows = &measured.contention.publishing;
    let rates = in_order(rows.iter().map(|row| row.rate));
    let contestants = in_order(rows.iter().map(|row| &row.contestant));
    let lines = contestants.into_iter().map(|contestant| Line {
        contestant: contestant.clone(),
        costs: rates
            .iter()
            .map(|&rate| measured.beside(contestant, rate).ok().map(|row| row.p999))
            .collect(),
    });
    Plot {
        file: "writer.svg",
        title: "A reader's batch of lookups beside a writer, 99.9 %",
        x: "publishes",
        columns: rates.iter().map(|&rate| rate_name(rate)).collect(),
        lines: lines.collect(),
    }
}

impl Plot {
    fn draw(&self, path: &Path) -> Result<(), Box<dyn Error + '_>> {
        let picture = SVGBackend::new(path, PICTURE).into_drawing_area();
        picture.fill(&WHITE)?;
        let (left, legend) = picture.split_horizontally(PICTURE.0 - LEGEND_WIDTH);

        let last = i32::try_from(self.columns.len())? - 1;
        let costs = || {
            self.lines
                .iter()
                .flat_map(|line| line.costs.iter().flatten())
        };
        let lowest = costs().copied().fold(f64::INFINITY, f64::min);
        let highest = costs().copied().fold(0.0, f64::max);
        let mut chart = ChartBuilder::on(&left)
            .caption(self.title, (FONT, 18))
            .margin(10)
            .x_label_area_size(45)
            .y_label_area_size(65)
            .build_cartesian_2d(0..last, (lowest / 1.5..highest * 1.5).log_scale())?;
        let column = |&at: &i32| {
            let column = usize::try_from(at).ok().and_then(|at| self.columns.get(at));
            column.cloned().unwrap_or_default()
        };
        chart
            .configure_mesh()
            .x_labels(self.columns.len())
            .x_label_formatter(&column)
            .x_desc(self.x)
            .y_label_formatter(&|&cost| time(cost))
            .light_line_style(WHITE)
            .label_style((FONT, 13))
            .draw()?;
        for (place, line) in self.lines.iter().enumerate() {
            let style = line.style(place);
            chart.draw_series(LineSeries::new(line.points(), style))?;
        }
        for (row, (place, line)) in (0..).zip(self.top_down()) {
            let y = 50 + row * LEGEND_LINE;
            let stroke = vec![(0, y), (25, y)];
            legend.draw(&PathElement::new(stroke, line.style(place)))?;
            let name = line.contestant.clone();
            legend.draw(&Text::new(name, (32, y - 7), (FONT, 14)))?;
        }
        picture.present()?;
        Ok(())
    }

    /// The lines, each with its number, as they end from the top down.
    fn top_down(&self) -> Vec<(usize, &Line)> {
        let mut lines: Vec<_> = self.lines.iter().enumerate().collect();
        lines.sort_by(|(_, a), (_, b)| b.last().total_cmp(&a.last()));
        lines
    }
}

impl Line {
    fn points(&self) -> impl Iterator<Item = (i32, f64)> {
        let points = (0..).zip(&self.costs);
        points.filter_map(|(at, cost)| Some((at, (*cost)?)))
    }

    fn last(&self) -> f64 {
        self.costs
            .iter()
            .rev()
            .flatten()
            .next()
            .copied()
            .unwrap_or(0.0)
    }

    /// This crate's own lines are the thick ones.
    fn style(&self, place: usize) -> ShapeStyle {
        match self.contestant.as_str() {
            "is_pinned" => RED.stroke_width(4),
            "Reader" | "Registry" => RED.mix(0.4).stroke_width(2),
            "floor" => BLACK.stroke_width(2),
            "empty loop" => BLACK.mix(0.3).stroke_width(1),
            _ => COLOURS[place % COLOURS.len()].stroke_width(1),
        }
    }
}
