// Makes elements, and texts of numbers and tokens.
const SVG = "http://www.w3.org/2000/svg";
const LONGEST = 32; // characters of a token in a table

function byId(id) {
  return document.getElementById(id);
}

// Makes an element. attributes: true for one without a value; false, null or undefined for none. children: elements or
// texts; null for none. Nothing is parsed as HTML.
function el(tag, attributes = {}, ...children) {
  return setContents(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return setContents(document.createElementNS(SVG, tag), attributes, children);
}

function setContents(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// A token's text with visible spaces and line ends.
function withVisibleSpaces(text) {
  if (text === "") return "(empty)";
  return text.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)).replace(/\n/g, "↵").replace(/\t/g, "⇥");
}

function tokenCode(text) {
  const whole = withVisibleSpaces(text);
  return el("code", {}, whole.length > LONGEST ? `${whole.slice(0, LONGEST - 1)}…` : whole);
}

function percent(share) {
  if (share === 0) return "0 %";
  if (share < 0.0001) return "< 0.01 %";
  const digits = share >= 0.1 ? 0 : share >= 0.01 ? 1 : 2;
  const shown = (100 * share).toFixed(digits);
  return shown === "100" && share < 1 ? "> 99 %" : `${shown} %`;
}

function countWithUnit(number, word) {
  return `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
}

// Shows a message, "" for none. The same message is not set again, so screen readers read it only once.
function showProblem(problem = "") {
  const place = byId("problem");
  if (place.textContent !== problem) place.textContent = problem;
  place.hidden = !problem;
  if (problem) place.scrollIntoView({ block: "nearest" });
}

// Scrolls to a node that is out of sight, so that it begins at the share `at` of the window's height.
function scrollIntoSight(node, at) {
  const { top, bottom } = node.getBoundingClientRect();
  if (top > 0.6 * innerHeight || bottom < 60) scrollBy(0, top - at * innerHeight);
}

// Announces new text to screen readers, at most once every `seconds`, so that a stream does not interrupt all else.
class Announcer {
  constructor(seconds) {
    this.wait = 1000 * seconds;
    this.pending = "";
    this.timer = null;
  }

  add(text) {
    this.pending += text;
    this.timer = this.timer || setTimeout(() => this.say(), this.wait);
  }

  say(last = "") {
    clearTimeout(this.timer);
    this.timer = null;
    const words = `${this.pending} ${last}`.trim();
    this.pending = "";
    if (words) byId("announce").textContent = words;
  }
}
