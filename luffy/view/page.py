"""The live page before its scripts fill it."""

from __future__ import annotations

from markupsafe import Markup

from luffy._version import __version__
from luffy.report.samples import colour_choice, colour_key

KEYS = (
    ("c s d", "curves, samples, differences"),
    ("j k", "next and previous sample of the list; arrows, Page, Home and End work in it too"),
    ("[ ]", "the same problem at the step before and after"),
    ("1 2 3", "colour by source, probability, gradient weight"),
    ("/", "search"),
    ("← →", "on a chart: read the values step by step"),
    ("t", "light or dark"),
    ("?", "these keys"),
)


def page_html() -> Markup:
    return Markup(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,"><title>luffy view</title>\n'
        '<link rel="stylesheet" href="/assets/components.css"><link rel="stylesheet" href="/assets/view.css">\n'
        '<script defer src="/assets/components.js"></script><script defer src="/assets/browser.js"></script>'
        '<script defer src="/assets/view.js"></script></head>\n<body><main>{}{}{}{}{}{}</main></body></html>\n'
    ).format(_header(), _waiting(), _curves(), _samples(), _differences(), _keys())


def _header() -> Markup:
    tabs = [("curves", "Curves"), ("samples", "Samples"), ("differences", "Differences")]
    tab = '<button type="button" role="tab" id="tab-{0}" aria-controls="{0}" data-tab="{0}">{1}</button>'
    return Markup(
        '<header class="top"><h1>luffy view</h1><p id="facts" class="facts" role="status">luffy {}</p>'
        '<div id="tabs" role="tablist" aria-label="what to see">{}</div>'
        '<div class="corner"><button type="button" id="show-keys">Keys</button> '
        '<button type="button" id="theme">Dark</button></div></header><ul id="remarks" class="remarks" hidden></ul>'
        "<noscript><p>The live page needs its scripts; luffy report makes one that does not.</p></noscript>"
    ).format(__version__, Markup("").join(Markup(tab).format(*names) for names in tabs))


def _waiting() -> Markup:
    """In place of the panels while no run has made a step."""
    return Markup(
        '<section id="waiting" aria-labelledby="waiting-h" hidden><h2 id="waiting-h">Waiting for the first step</h2>'
        '<p id="waiting-for"></p><ul id="waiting-folders"></ul>'
        '<p class="note">The page fills by itself. A large model and its first step take minutes.</p>'
        "</section>"
    )


def _panel(name: str, content: Markup) -> Markup:
    frame = '<section id="{0}" class="panel" role="tabpanel" aria-labelledby="tab-{0}" hidden>{1}</section>'
    return Markup(frame).format(name, content)


def _curves() -> Markup:
    return _panel(
        "curves",
        Markup(
            '<fieldset id="methods" class="legend" aria-label="methods"></fieldset>'
            '<div class="tools"><label>Smoothing <input type="range" id="smoothing" min="0" max="0.98" step="0.02" '
            'value="0"> <output id="smoothing-value">0</output></label>'
            '<label>Add a chart <select id="add-chart"></select></label>'
            '<button type="button" id="clear-charts" hidden>Remove added charts</button></div>'
            '<p class="intro">Thick lines are means over seeds, thin lines single seeds as recorded, bands the range '
            'from lowest to highest seed.</p><div id="charts" aria-live="off"></div>'
            '<ul id="chart-remarks" class="remarks note"></ul>'
            '<h2>Figures so far</h2><div id="final"></div><div id="phases"></div><div id="runs"></div>'
        ),
    )


def _samples() -> Markup:
    return _panel(
        "samples",
        Markup(
            '<form id="filters" class="tools" role="search"><label>Run <select name="run"></select></label>'
            '<label>Set <select name="file"><option value="train">training</option>'
            '<option value="eval">held-out</option></select></label>'
            '<label>Step <select name="step"><option value="">all</option></select></label>'
            '<label>Reward <select name="reward"><option value="">any</option><option value="solved">solved</option>'
            '<option value="unsolved">not solved</option></select></label>'
            '<label>Tokens <input name="shortest" type="number" min="0" placeholder="from" aria-label="least tokens"> '
            '<input name="longest" type="number" min="0" placeholder="to" aria-label="most tokens"></label>'
            '<label>Written by <select name="off_policy"><option value="">any</option>'
            '<option value="teacher">teacher, in part</option><option value="override">override, in part</option>'
            '<option value="policy">policy alone</option></select></label>'
            '<label><input name="truncated" type="checkbox" value="1"> truncated</label>'
            '<label class="search">Search <input name="search" type="search" autocomplete="off" spellcheck="false" '
            'placeholder="in prompts and responses"></label></form>'
            '<div class="browser"><div class="pane"><p id="count" class="note" role="status"></p>'
            '<div id="list" role="listbox" tabindex="0" aria-label="samples"><div id="rows"></div></div></div>'
            '<div class="detail"><div class="tools">{}<label class="slider" id="slider" hidden>Step '
            '<input type="range" id="at-step" min="0" step="1"> <output id="at-step-value"></output></label></div>'
            '{}<div id="group"><p class="note">Choose a sample.</p></div></div></div>'
        ).format(colour_choice(), colour_key()),
    )


def _differences() -> Markup:
    return _panel(
        "differences",
        Markup(
            '<div class="tools"><label>Compare <select id="by"><option value="method">methods</option>'
            '<option value="run">single runs</option></select></label></div>'
            '<p class="intro">Every setting that is not the same in all of them. Methods that are switched off under '
            'Curves are left out.</p><div id="knobs"></div>'
            '<div id="changes" hidden><h2>Settings changed at a resume</h2><div id="change-table"></div></div>'
        ),
    )


def _keys() -> Markup:
    rows = Markup("").join(
        Markup("<dt>{}</dt><dd>{}</dd>").format(
            Markup(" ").join(Markup("<kbd>{}</kbd>").format(key) for key in keys.split()), said
        )
        for keys, said in KEYS
    )
    return Markup(
        '<dialog id="keys" aria-labelledby="keys-h"><h2 id="keys-h">Keys</h2><dl>{}</dl>'
        '<button type="button" id="hide-keys">Close</button></dialog>'
    ).format(rows)
