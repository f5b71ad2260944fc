// An answer's markdown as elements: code, headings, lists, emphasis; everything else stays as it was written.
// Makes nodes and never HTML out of text, so nothing a model writes can become part of the page.

const FENCE = /^\s*```/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*\d+[.)]\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(\S|\S.*?\S)\*\*|\*(\S|\S[^*]*?\S)\*/gs;

function node(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function inline(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(text.slice(end, found.index));
    if (found[2] !== undefined) parts.push(node("code", found[2]));
    else if (found[3] !== undefined) parts.push(node("strong", ...inline(found[3])));
    else parts.push(node("em", ...inline(found[4])));
    end = found.index + found[0].length;
  }
  parts.push(text.slice(end));
  return parts.filter((part) => part !== "");
}

export function render(text) {
  const blocks = document.createDocumentFragment();
  const lines = text.split("\n");
  let paragraph = [];
  let list = null;
  const flush = () => {
    if (paragraph.join("").trim()) blocks.append(node("p", ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    if (FENCE.test(line)) {
      flush();
      list = null;
      const code = [];
      while (++i < lines.length && !FENCE.test(lines[i])) code.push(lines[i]);
      const block = node("pre", node("code", code.join("\n")));
      block.tabIndex = 0; // wide code scrolls, with keys too
      blocks.append(block);
      continue;
    }
    const heading = HEADING.exec(line);
    const kind = BULLET.test(line) ? "ul" : NUMBER.test(line) ? "ol" : null;
    if (kind) {
      flush();
      if (list?.localName !== kind) {
        list = node(kind);
        if (kind === "ol") list.start = parseInt(line, 10);
        blocks.append(list);
      }
      list.append(node("li", ...inline((BULLET.exec(line) ?? NUMBER.exec(line))[1])));
    } else if (heading) {
      flush();
      list = null;
      blocks.append(node("h3", ...inline(heading[2])));
    } else if (line.trim() === "") {
      flush();
      // An empty line between two items does not end their list.
      if (!/^\s*([-*+]|\d+[.)])\s/.test(lines[i + 1] ?? "")) list = null;
    } else {
      list = null;
      paragraph.push(line);
    }
  }
  flush();
  return blocks;
}
