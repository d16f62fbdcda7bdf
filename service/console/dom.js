// DOM elements without a framework. They are built by calls, never from HTML strings, so that user input cannot become
// markup. The content security policy forbids it too.

const SVG = "http://www.w3.org/2000/svg";
const READ_ONLY = ["list", "form"]; // read-only properties with an attribute

/**
 * An HTML element: `h("p.hint", { title }, children)`. `tag`: with classes. `props`, which may be omitted: `class` (instead of
 * those of the tag), `on…` listeners, `dataset`, `style` (an object), properties such as `value`, and attributes. Null and
 * undefined are skipped, and false unless the property is boolean. `children`: text, an element, or a nested list of them.
 */
export const h = (tag, ...rest) => build((name) => document.createElement(name), tag, rest);

/** An element with a child for each of `items`. */
export const each = (tag, items, make) => h(tag, items.map(make));

/** An SVG element. */
export const svg = (tag, ...rest) => build((name) => document.createElementNS(SVG, name), tag, rest);

function build(create, tag, rest) {
  const [name, ...classes] = tag.split(".");
  const element = create(name);
  if (classes.length > 0) element.setAttribute("class", classes.join(" "));
  const props = rest[0]?.constructor === Object ? rest.shift() : {};
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined) continue;
    if (value === false && typeof element[name] !== "boolean") continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2).toLowerCase(), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name in element && !(element instanceof SVGElement) && !READ_ONLY.includes(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...nodes(rest));
  return element;
}

/** Flatten nested lists of text and elements, without null, undefined and false. */
function nodes(children) {
  return children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false);
}

/** Replace the children of `element`. */
export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
  return element;
}

/** An icon from the set below, hidden from screen readers, because its label says the same. */
export function icon(name) {
  return svg("svg.icon", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

const ICONS = {
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14M16 16l5 5",
  enroll: "M10 11a4 4 0 1 0 0-8 4 4 0 0 0 0 8M3 21c.6-4 3.500-6 7-6s6.400 2 7 6M19 8v6M16 11h6",
  compare: "M8 4H4v16h4M16 4h4v16h-4M12 2v20",
  gallery: "M4 5h16v14H4zM4 15l4-4 4 4 3-3 5 5M15.500 9h.01",
  people:
    "M9 11a3.500 3.500 0 1 0 0-7 3.500 3.500 0 0 0 0 7M2.500 20c.5-3.700 3-5.500 6.500-5.500s6 1.800 6.500 5.500M16 4.500a3.500 3.500 0 0 1 0 6.300M18 14.800c2 .7 3.200 2.400 3.500 5.200",
  risk: "M3 20h18M4 16c5 0 5-11 9-11s4 11 8 11",
  hygiene: "M12 3v4M12 17v4M3 12h4M17 12h4M6 6l2.500 2.500M15.500 15.500 18 18M18 6l-2.500 2.500M8.500 15.500 6 18",
  jobs: "M4 6h10M4 12h16M4 18h7M18 15l3 3-3 3",
  health: "M3 12h4l3-7 4 14 3-7h4",
  key: "M14.500 9.500a4.500 4.500 0 1 0-3.800 4.450L12.500 16H15v2.500h2.500V21H21v-3.500l-6.700-6.700c.1-.4.2-.8.2-1.300M9 9h.01",
  photo: "M3 7h4l2-3h6l2 3h4v13H3zM12 17a4 4 0 1 0 0-8 4 4 0 0 0 0 8",
  paste: "M9 4H5v17h14V4h-4M9 3h6v4H9z",
  upload: "M12 16V4M7 9l5-5 5 5M4 16v4h16v-4",
  check: "M4 12.500 9.500 18 20 6.500",
  question: "M8.500 9a3.500 3.500 0 1 1 5 3.200c-1 .5-1.500 1.200-1.500 2.300M12 19h.01",
  stranger: "M12 12a4 4 0 1 0 0-8 4 4 0 0 0 0 8M5 21c.7-4 3.400-6 7-6M15 16l5 5M20 16l-5 5",
  warning: "M12 3 2 20h20zM12 10v4M12 17h.01",
  trash: "M4 7h16M9 7V4h6v3M6 7l1 14h10l1-14M10 11v6M14 11v6",
  edit: "M4 20h4L20 8l-4-4L4 16z",
  move: "M4 12h15M14 7l5 5-5 5",
  close: "M5 5l14 14M19 5 5 19",
  plus: "M12 5v14M5 12h14",
  minus: "M5 12h14",
  back: "M20 12H5M10 7l-5 5 5 5",
  settings:
    "M4 7h9M19 7h1M4 17h1M11 17h9M16 4.500a2.500 2.500 0 1 0 0 5 2.500 2.500 0 0 0 0-5M8 14.500a2.500 2.500 0 1 0 0 5 2.500 2.500 0 0 0 0-5",
  docs: "M5 3h10l4 4v14H5zM14 3v5h5M9 12h6M9 16h6",
};
