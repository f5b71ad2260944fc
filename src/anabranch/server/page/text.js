// An answer's markdown as elements: code, headings, lists, quotes, tables, links, emphasis; everything else stays as it
// was written. Makes nodes and never HTML out of text, so nothing a model writes can become part of the page.

const FENCE = /^\s*```/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const ITEM = /^(\s*)([-*+]|\d+[.)])\s+(.*)$/;
const UNDER_HEAD = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/; // the line between a table's head and its rows
const INLINE = new RegExp(
  [
    /(`+)(.+?)\1/, // 2: code
    /\*\*(\S|\S.*?\S)\*\*/, // 3: strong
    /\*(\S|\S[^*]*?\S)\*/, // 4: emphasis
    /\[([^\]\n]+)\]\(((?:https?:\/\/|mailto:)(?:[^\s()]|\([^\s()]*\))+)\)/, // 5, 6: link; no other kinds of address
    /(https?:\/\/[^\s<>()[\]"'`*]*[^\s<>()[\]"'`*.,;:!?])/, // 7: an address by itself
  ].map((part) => part.source).join("|"),
  "gs",
);
const DEEPEST = 8; // lists and quotes in one another; below that they are plain text

function node(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function link(address, ...children) {
  const made = node("a", ...children);
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  made.title = address; // before it is followed: a model has written it
  return made;
}

function inline(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [all, , code, strong, emphasis, words, address, bare] = found;
    parts.push(text.slice(end, found.index));
    if (code !== undefined) parts.push(node("code", code));
    else if (strong !== undefined) parts.push(node("strong", ...inline(strong)));
    else if (emphasis !== undefined) parts.push(node("em", ...inline(emphasis)));
    else if (words !== undefined) parts.push(link(address, words));
    else parts.push(link(bare, bare));
    end = found.index + all.length;
  }
  parts.push(text.slice(end));
  return parts.filter((part) => part !== "");
}

export function render(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  const made = [];
  let paragraph = [];
  const add = (...nodes) => {
    if (paragraph.join("").trim()) made.push(node("p", ...inline(paragraph.join("\n"))));
    paragraph = [];
    made.push(...nodes);
  };
  for (let i = 0; i < lines.length; ) {
    const line = lines[i];
    const [heading, item] = [HEADING.exec(line), ITEM.exec(line)];
    let end = i + 1; // of what starts here
    if (FENCE.test(line)) {
      while (end < lines.length && !FENCE.test(lines[end])) end++;
      add(scrolling(node("pre", node("code", lines.slice(i + 1, end).join("\n")))));
      end++;
    } else if (RULE.test(line)) {
      add(node("hr"));
    } else if (heading) {
      add(node("h3", ...inline(heading[2])));
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      while (end < lines.length && QUOTE.test(lines[end])) end++;
      add(node("blockquote", ...blocks(lines.slice(i, end).map((one) => QUOTE.exec(one)[1]), depth + 1)));
    } else if (item && depth < DEEPEST) {
      end = endOfList(lines, i, item);
      add(list(lines.slice(i, end), item, depth));
    } else if (line.includes("|") && lines[i + 1]?.includes("|") && UNDER_HEAD.test(lines[i + 1])) {
      end = i + 2;
      while (end < lines.length && lines[end].includes("|")) end++;
      add(table(lines.slice(i, end)));
    } else if (line.trim() === "") {
      add();
    } else {
      paragraph.push(line);
    }
    i = end;
  }
  add();
  return made;
}

/** Wide content scrolls, with keys too. */
function scrolling(element) {
  element.tabIndex = 0;
  return element;
}

const kind = (item) => (/\d/.test(item[2]) ? "ol" : "ul");

/** Of a list: items like its first, what is indented under them, and empty lines between. */
function endOfList(lines, start, first) {
  const belongs = (line) => {
    const item = ITEM.exec(line);
    const indent = line.length - line.trimStart().length;
    return indent > first[1].length + 1 || (item && indent >= first[1].length && kind(item) === kind(first));
  };
  let end = start + 1;
  for (let i = end; i < lines.length; i++) {
    if (lines[i].trim() === "") continue;
    if (!belongs(lines[i])) break;
    end = i + 1;
  }
  return end;
}

function list(lines, first, depth) {
  const made = node(kind(first));
  if (made.localName === "ol") made.start = parseInt(first[2], 10);
  let inside = [];
  const close = () => {
    if (!inside.length) return;
    const indents = inside.slice(1).filter((line) => line.trim()).map((line) => line.length - line.trimStart().length);
    const rest = inside.slice(1).map((line) => line.slice(Math.min(...indents)));
    made.append(node("li", ...inline(inside[0]), ...blocks(rest, depth + 1)));
  };
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= first[1].length + 1) {
      close();
      inside = [item[3]];
    } else {
      inside.push(line);
    }
  }
  close();
  return made;
}

function table([head, , ...rows]) {
  const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/);
  const row = (name, line) =>
    node("tr", ...cells(line).map((cell) => node(name, ...inline(cell.trim().replaceAll("\\|", "|")))));
  const made = node("table", node("thead", row("th", head)), node("tbody", ...rows.map((line) => row("td", line))));
  return scrolling(Object.assign(node("div", made), { className: "table" }));
}
