// Markdown as a model writes it, to elements: paragraphs, headings, lists, quotes, code, bold and italic.
// Everything else stays the text that it is. Nothing is ever parsed as HTML.

import { element } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(\S(?:[\s\S]*?\S)?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*|(?<!\w)_([^\s_](?:[^_]*[^\s_])?)_(?!\w)/;

/** A fragment of the elements that a text describes. */
export function markdown(text) {
  return blocks(text.split("\n"));
}

function blocks(lines) {
  const made = document.createDocumentFragment();
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) made.append(element("p", {}, inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let index = 0; index < lines.length; ) {
    const line = lines[index];
    const kind = FENCE.test(line) ? fence : ITEM.test(line) ? list : QUOTE.test(line) ? quote : null;
    const heading = HEADING.exec(line);
    if (kind !== null) {
      flush();
      index = kind(lines, index, made);
      continue;
    }
    if (heading) {
      flush();
      // The page's own headings end at the second level.
      const level = Math.min(heading[1].length + 2, 6);
      made.append(element(`h${level}`, {}, inline(heading[2])));
    } else if (line.trim() === "") {
      flush();
    } else {
      paragraph.push(line);
    }
    index += 1;
  }
  flush();
  return made;
}

function fence(lines, index, made) {
  const [, mark, language] = FENCE.exec(lines[index]);
  const code = [];
  for (index += 1; index < lines.length && !lines[index].trim().startsWith(mark); index += 1) {
    code.push(lines[index]);
  }
  const label = language ? `Code: ${language}` : "Code";
  made.append(element("pre", { tabIndex: 0, "aria-label": label }, element("code", {}, code.join("\n"))));
  return index + 1;
}

function list(lines, index, made) {
  const [, indent, mark] = ITEM.exec(lines[index]);
  const ordered = /\d/.test(mark);
  const items = element(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  while (index < lines.length) {
    const item = ITEM.exec(lines[index]);
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== ordered) break;
    const inside = [item[3]];
    for (index += 1; index < lines.length; index += 1) {
      const next = lines[index];
      const deeper = next.length - next.trimStart().length > indent.length;
      if (next.trim() === "" ? !/^\s/.test(lines[index + 1] ?? "") : !deeper) break;
      inside.push(next.slice(Math.min(next.length - next.trimStart().length, indent.length + 2)));
    }
    // Blank lines between items do not end a list.
    if (lines[index]?.trim() === "" && sameList(lines[index + 1], indent, ordered)) index += 1;
    const content = blocks(inside);
    const only = content.childNodes;
    items.append(element("li", {}, ...(only[0]?.tagName === "P" ? [...only[0].childNodes, ...[...only].slice(1)] : only)));
  }
  made.append(items);
  return index;
}

function sameList(line, indent, ordered) {
  const item = ITEM.exec(line ?? "");
  return item !== null && item[1].length === indent.length && /\d/.test(item[2]) === ordered;
}

function quote(lines, index, made) {
  const inside = [];
  for (; index < lines.length && QUOTE.test(lines[index]); index += 1) inside.push(QUOTE.exec(lines[index])[1]);
  made.append(element("blockquote", {}, blocks(inside)));
  return index;
}

function inline(text) {
  const made = document.createDocumentFragment();
  for (;;) {
    const found = INLINE.exec(text);
    if (found === null) break;
    made.append(text.slice(0, found.index));
    const [whole, tick, code, bold, starred, underlined] = found;
    if (tick) made.append(element("code", {}, code));
    else if (bold) made.append(element("strong", {}, inline(bold)));
    else made.append(element("em", {}, inline(starred ?? underlined)));
    text = text.slice(found.index + whole.length);
  }
  made.append(text);
  return made;
}
