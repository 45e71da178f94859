// What the theme makes while a page loads gets names, and what scrolls can be reached by the keyboard.
const NAMES = { ".md-search": "Search the documentation", ".md-search__options": "Search options" };
const label = () => {
  Object.entries(NAMES).forEach(([what, name]) => document.querySelector(what)?.setAttribute("aria-label", name));
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((bar) => {
    bar.setAttribute("aria-label", `Code ${[...document.querySelectorAll(".md-code__nav")].indexOf(bar) + 1}`);
  });
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach((table) => (table.tabIndex = 0));
  // The theme does so only where there is a pointer that can hover, and takes it away again elsewhere.
  document.querySelectorAll("pre > code:not([tabindex])").forEach((code) => {
    if (code.scrollWidth > code.clientWidth) code.tabIndex = 0;
  });
};
const watched = { childList: true, subtree: true, attributeFilter: ["tabindex"] };
new MutationObserver(label).observe(document.body, watched);
addEventListener("resize", label);
label();
