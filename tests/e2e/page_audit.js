// What a reader with a keyboard, a screen reader, weak eyes or a narrow screen would stumble over.
() => {
  const problems = [];
  const isSeen = (node) => node.checkVisibility({ visibilityProperty: true });
  const say = (node, what) => problems.push(`${what}: ${node.outerHTML.slice(0, 120)}`);
  const named = (node) => (node.getAttribute('aria-label') || node.labels?.[0]?.textContent ||
    (node.getAttribute('aria-labelledby') ?? '').split(' ').map((id) => document.getElementById(id)?.textContent ?? '').join('') ||
    (node.tagName === 'BUTTON' ? node.textContent : '')).trim();
  const rgb = (color) => {
    const [r, g, b, a = 1] = color.match(/[\d.]+/g).map(Number);
    return { r, g, b, a };
  };
  const luminance = ({ r, g, b }) => {
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color.a === 1) return color;
    }
    return { r: 255, g: 255, b: 255 };
  };
  for (const node of document.querySelectorAll('button, input, select, a, dialog, table, [role=img]')) {
    if (isSeen(node) && !named(node)) say(node, 'has no name');
  }
  for (const node of document.querySelectorAll('th')) if (!node.scope) say(node, 'heads nothing');
  for (const node of document.querySelectorAll('tbody td, tbody th, p, dt, dd, h1, h2, h3, li, span, button')) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!hasText || !isSeen(node)) continue;
    const [x, y] = [luminance(rgb(getComputedStyle(node).color)), luminance(ground(node))].sort((a, b) => b - a);
    const contrast = (x + 0.05) / (y + 0.05);
    if (contrast < 4.5) say(node, `contrast ${contrast.toFixed(2)}`);
  }
  const ids = [...document.querySelectorAll('[id]')].map((node) => node.id);
  if (new Set(ids).size !== ids.length) problems.push('an id stands twice');
  if (document.querySelectorAll('h1').length !== 1) problems.push('there is not one h1');
  if (!document.documentElement.lang) problems.push('the language is not told');
  const [inside, width] = [document.documentElement.scrollWidth, innerWidth];
  if (inside > width) problems.push(`${inside} px are wider than the window's ${width}`);
  const dialog = document.querySelector('dialog[open]');
  if (dialog && dialog.scrollWidth > dialog.clientWidth) problems.push('the dialog scrolls sideways');
  return problems;
}
