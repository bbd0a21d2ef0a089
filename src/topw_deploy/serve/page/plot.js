// The map of tokens: a plane in which the distances of points approximate the distances of the tokens.
const PLOT = { width: 420, height: 340, margin: 26, labels: 18 };

// Draws the map of an inspection. Returns a figure; null if there are no distances to show.
function plot(found) {
  if (!found.plane) return null;
  const tokens = new Map(found.tokens.map((token) => [token.id, token]));
  const points = found.plane.points.map((point) => ({ ...point, token: tokens.get(point.id) }));
  const toFrame = planeToFrame(points);
  const { width, height } = PLOT;
  const axis = (move, name) => svg("text", { class: "axis", "text-anchor": "middle", transform: move }, name);
  const parts = [svg("rect", { class: "frame", x: 0.5, y: 0.5, width: width - 1, height: height - 1, rx: 8 }),
    axis(`translate(${width / 2} ${height - 7})`, "first principal coordinate"),
    axis(`translate(14 ${height / 2}) rotate(-90)`, "second principal coordinate")];
  const order = [...points].sort((a, b) => a.token.probability - b.token.probability);
  for (const point of order) parts.push(drawToken(point, toFrame(point), found.token.id));
  parts.push(...drawLabels(points, toFrame, found.token.id));
  const name = `Map of ${points.length} tokens by distance; the table lists them.`;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name }, ...parts);
  return el("figure", {}, el("h3", {}, "How far apart they are"), drawing, el("figcaption", {},
    `Distances of the metric ${found.metric}, flattened to a plane that shows ${percent(found.plane.share)} of their `
    + "spread. Blue: kept; green: kept because of distances; orange ring: dropped because of distances; grey: others; "
    + "outer ring: drawn. Larger is likelier."));
}

// The function from a point of the plane to its place in the frame. Both axes have the same scale.
function planeToFrame(points) {
  const xs = points.map((point) => point.x), ys = points.map((point) => point.y);
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const inner = [PLOT.width - 4 * PLOT.margin, PLOT.height - 3 * PLOT.margin];
  const unit = Math.min(inner[0] / (right - left || 1), inner[1] / (high - low || 1));
  return (point) => [PLOT.width / 2 + (point.x - (left + right) / 2) * unit,
    PLOT.height / 2 - 6 - (point.y - (low + high) / 2) * unit];
}

function radius(token) {
  return 3 + 9 * Math.sqrt(token.probability);
}

function drawToken({ token }, [x, y], drawn) {
  const kept = token.drawn_with > 0;
  const look = token.change || (kept ? "kept" : "other");
  const title = svg("title", {}, `${withVisibleSpaces(token.text)}: ${percent(token.probability)}`);
  const size = radius(token);
  const parts = [svg("circle", { class: look, cx: x, cy: y, r: size })];
  if (token.id === drawn) parts.push(svg("circle", { class: "ring", cx: x, cy: y, r: size + 3.5 }));
  return svg("g", {}, ...parts, title);
}

// Labels of the drawn, the moved and the likeliest tokens. A label that would overlap another mark is left out; that of
// the drawn token never is.
function drawLabels(points, toFrame, drawn) {
  const rank = (token) => (token.id === drawn ? 3 : token.drawn_with > 0 ? 2 : token.change ? 1 : 0);
  const weight = ({ token }) => rank(token) + token.probability;
  const taken = points.map((point) => {
    const [x, y] = toFrame(point), r = radius(point.token) + (point.id === drawn ? 4 : 0);
    return [x - r, y - r, x + r, y + r, point.id];
  });
  const made = [];
  for (const point of [...points].sort((a, b) => weight(b) - weight(a))) {
    if (made.length === PLOT.labels) break;
    const [x, y] = toFrame(point), gap = radius(point.token) + (point.id === drawn ? 8 : 4);
    const text = withVisibleSpaces(point.token.text).slice(0, 14), wide = 6.4 * text.length + 2;
    const places = [["start", x + gap, y + 4], ["end", x - gap, y + 4], ["middle", x, y - gap - 1],
      ["middle", x, y + gap + 9]];
    const must = point.id === drawn;
    for (const [anchor, left, base] of places) {
      const start = anchor === "start" ? left : anchor === "end" ? left - wide : left - wide / 2;
      const box = [start, base - 10, start + wide, base + 3];
      const inside = box[0] > 22 && box[2] < PLOT.width - 4 && box[1] > 3 && box[3] < PLOT.height - 18;
      if (!inside || !must && taken.some((other) => other[4] !== point.id && overlaps(box, other))) continue;
      taken.push([...box, null]);
      made.push(svg("text", { x: left, y: base, "text-anchor": anchor }, text));
      break;
    }
  }
  return made;
}

function overlaps(a, b) {
  return a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
}
