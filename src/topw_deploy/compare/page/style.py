"""The page's style sheet."""

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --text: #1f2933; --muted: #55606b; --line: #d9dee3; --soft: #f5f7f9;
  --c0: #0072b2; --c1: #c44f00; --c2: #00805c; --c3: #a0508f; --c4: #9a6a00; --c5: #505d66; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14181c; --text: #e6eaee; --muted: #a3adb7; --line: #343c44; --soft: #1c2228;
    --c0: #56b4e9; --c1: #ff8a4c; --c2: #35cfa2; --c3: #dd93cd; --c4: #f0c04a; --c5: #b4bfc9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 90rem; background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.muted, dd, figcaption small { color: var(--muted); }
.legend, .choices { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: .5rem 0; margin: 0 0 .8rem;
  list-style: none; position: sticky; top: 0; background: var(--bg); border-bottom: 1px solid var(--line); }
.key { width: 34px; height: 12px; vertical-align: -1px; margin-right: .35rem; overflow: visible; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1rem; }
figure { margin: 0; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg.key { width: 34px; display: inline-block; }
svg text { fill: var(--muted); font: 11px system-ui, sans-serif; }
svg path { fill: none; stroke: currentColor; stroke-width: 1.8; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .whisker { stroke-width: 1; opacity: .75; }
svg .m { fill: currentColor; stroke: none; }
svg .x { stroke-width: 2.2; }
.l0 { color: var(--c0); } .l1 { color: var(--c1); } .l2 { color: var(--c2); }
.l3 { color: var(--c3); } .l4 { color: var(--c4); } .l5 { color: var(--c5); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .45rem; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-size: .85rem; }
tr > :nth-child(2) { text-align: left; }
tr.first > * { border-top: 2px solid var(--muted); }
td small { color: var(--muted); display: block; font-size: .75rem; line-height: 1.2; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; }
fieldset { border: 0; margin: 0; padding: 0; }
legend { float: left; font-weight: 600; margin-right: .6rem; padding: 0; }
fieldset label { margin-right: .9rem; } fieldset[hidden] { display: none; }
article { border-top: 2px solid var(--line); padding: .6rem 0 1rem; }
.prompt { font-weight: 600; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 .5rem; font-size: 1rem; }
.columns { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(11rem, 1fr); gap: .8rem;
  overflow-x: auto; }
.columns h4 { margin: 0 0 .3rem; font-size: .9rem; }
.text { display: none; margin: 0; padding: .5rem; background: var(--soft); white-space: pre-wrap;
  overflow-wrap: anywhere; unicode-bidi: isolate; font-size: .88rem; }
@supports not selector(:has(a)) { .text { display: block; } }
.text small { display: block; margin-top: .4rem; color: var(--muted); }
"""
