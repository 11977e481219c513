// Building and changing the page. Text from the network only ever becomes text: there is no way to HTML in here.

const SVG = "http://www.w3.org/2000/svg";

/** The element of that id, which the page has. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element ${id}`);
  return found;
}

/** A new element with attributes and children, which are elements or text. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same, for drawings. */
export function drawing(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

/** Change a text only if it is another: what is selected or read aloud stays. */
export function setText(target, text) {
  if (target.textContent !== String(text)) target.textContent = text;
}

const kept = new WeakMap();

/** Children of `parent` for items, by their keys: those that stay are changed, not made again. */
export function keyed(parent, items, keyOf, make, change) {
  const before = kept.get(parent) ?? new Map();
  const now = new Map();
  items.forEach((item, index) => {
    const key = keyOf(item);
    const child = before.get(key) ?? make(item);
    now.set(key, child);
    change(child, item);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  for (const [key, child] of before) if (now.get(key) !== child) child.remove();
  kept.set(parent, now);
}

/** A bar of parts, each a share from 0 to 1 with a class; `label` says it in words. */
export function setBar(bar, label, parts) {
  keyed(bar, parts, (part) => part.kind, (part) => element("span", { class: `part ${part.kind}` }), (span, part) => {
    span.style.width = `${(100 * Math.min(1, Math.max(0, part.share))).toFixed(2)}%`;
  });
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", label);
}
