// What a strict reader of a page would complain of, as a list of sentences.
function faultsOf(window, document) {
  const faults = new Set();
  const add = (kind, text) => faults.add(`${kind}: ${text.trim().slice(0, 60)}`);
  const shown = (element) => element.checkVisibility({visibilityProperty: true});

  const needed = document.documentElement.scrollWidth;
  if (needed > window.innerWidth) add("scrolls sideways", `${needed}`);

  // ---- every line of text with its box
  const lines = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style") || !shown(parent)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width > 0) lines.push({node, parent, box});
    }
  }

  for (const {node, parent, box} of lines) {
    if (box.left < -0.5 || box.right > window.innerWidth + 0.5)
      add("outside of the page", node.data);
    for (let above = parent; above !== document.body; above = above.parentElement) {
      const outer = above.getBoundingClientRect();
      const style = window.getComputedStyle(above);
      const clips = style.overflowX !== "visible";
      const clipsBelow = style.overflowY === "hidden" || style.overflowY === "clip";
      if (clipsBelow && (box.top < outer.top - 1.5 || box.bottom > outer.bottom + 1.5))
        add("cut", node.data);
      if (!clips && above.localName !== "figure") continue;
      if (box.left < outer.left - 0.5 || box.right > outer.right + 0.5)
        add("cut", node.data);
    }
  }

  // ---- no short word in two pieces: its column is too narrow to be read
  for (const node of new Set(lines.map((line) => line.node))) {
    for (const word of node.data.matchAll(/(?<!\S)[A-Za-z]{2,8}(?!\S)/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      // WebKit gives a box without a width where the line before the word ends.
      const boxes = [...range.getClientRects()].filter((box) => box.width > 0);
      const tops = boxes.map((box) => Math.round(box.top));
      if (Math.max(...tops) - Math.min(...tops) > 4) add("a broken word", node.data);
    }
  }

  // ---- no line upon another one; a font's box may be higher than its line, in WebKit
  for (const line of lines) {
    const lineHeight = parseFloat(window.getComputedStyle(line.parent).lineHeight);
    const excess = Math.max(0, line.box.height - lineHeight) / 2 || 0;
    line.top = line.box.top + excess;
    line.bottom = line.box.bottom - excess;
  }
  lines.sort((one, other) => one.top - other.top);
  lines.forEach(({node, box, bottom}, index) => {
    for (const {node: otherNode, box: other, top, bottom: otherBottom} of lines.slice(index + 1)) {
      if (top > bottom - 1.5) break;
      const width = Math.min(box.right, other.right) - Math.max(box.left, other.left);
      const height = Math.min(bottom, otherBottom) - top;
      if (otherNode !== node && width > 1 && height > 1.5)
        add("upon each other", `${node.data} | ${otherNode.data}`);
    }
  });

  // ---- contrast, as WCAG computes it
  const channels = (text) => {
    const numbers = text.match(/[\d.]+/g).map(Number);
    return {rgb: numbers.slice(0, 3), alpha: numbers[3] ?? 1};
  };
  const mix = (over, under, alpha) => over.map((c, i) => c * alpha + under[i] * (1 - alpha));
  const paperUnder = (element) => {
    if (!element) return [255, 255, 255];
    const {rgb, alpha} = channels(window.getComputedStyle(element).backgroundColor);
    return alpha === 1 ? rgb : mix(rgb, paperUnder(element.parentElement), alpha);
  };
  const opacityOf = (element) => {
    let opacity = 1;
    for (let above = element; above; above = above.parentElement)
      opacity *= Number(window.getComputedStyle(above).opacity);
    return opacity;
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => {
      const share = c / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (ink, paper) => {
    const [low, high] = [luminance(ink), luminance(paper)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  for (const parent of new Set(lines.map((line) => line.parent))) {
    const paper = paperUnder(parent);
    const ink = channels(window.getComputedStyle(parent).color);
    const ratio = contrast(mix(ink.rgb, paper, ink.alpha * opacityOf(parent)), paper);
    if (ratio < 4.5) add(`contrast ${ratio.toFixed(1)}`, parent.textContent);
  }
  for (const shape of document.querySelectorAll(".fill, .key, .line, .area, .limit, .trend")) {
    const style = window.getComputedStyle(shape);
    const isHtml = shape instanceof window.HTMLElement;
    const colour = isHtml ? style.backgroundColor : shape.matches(".area") ? style.fill : style.stroke;
    const paper = paperUnder(shape.parentElement.closest("figure") ?? document.body);
    const ratio = contrast(mix(channels(colour).rgb, paper, opacityOf(shape)), paper);
    if (ratio < 3) add(`contrast of a shape ${ratio.toFixed(1)}`, shape.getAttribute("class"));
  }

  for (const bar of document.querySelectorAll("rect.area")) {
    const width = bar.getBoundingClientRect().width;
    if (width < 1 && window.getComputedStyle(bar).stroke === "none")
      add("a bar that is not seen", `${width.toFixed(2)} pixels wide`);
  }

  // ---- axes, bars, keyboard
  for (const plot of document.querySelectorAll(".plot")) {
    const figure = plot.closest("figure");
    const labels = (kind) => [...plot.querySelectorAll(kind)].map((label) => label.textContent);
    if (!figure.querySelector(".x-name")?.textContent) add("x axis without a name", figure.textContent);
    const withUnit = labels(".y").every((label) => /[a-zA-Z%]/.test(label.replace("M", "")));
    if (!figure.querySelector(".y-name")?.textContent && !withUnit)
      add("y axis without a unit", labels(".y").join(" "));
    for (const kind of [".x", ".y"])
      if (!labels(kind).length) add(`no number at an axis ${kind}`, figure.textContent);
    if (plot.tabIndex !== 0) add("not to be reached by the keyboard", figure.textContent);
    if (!plot.getAttribute("aria-label")) add("no words for those who cannot see it", figure.textContent);
    const said = figure.querySelector("output").textContent;
    if (plot.getAttribute("role") === "slider" && plot.getAttribute("aria-valuetext") !== said)
      add("not said what is shown", said);
  }
  for (const bars of document.querySelectorAll(".bars")) {
    const ends = [...bars.querySelectorAll(".track")].map((track) => {
      const box = track.getBoundingClientRect();
      return `${box.left.toFixed(0)} to ${box.right.toFixed(0)}`;
    });
    if (new Set(ends).size > 1) add("bars that cannot be compared", ends.join(", "));
  }
  return [...faults];
}
