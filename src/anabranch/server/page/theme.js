// Light or dark, set before the first paint. "auto" follows the system; a choice is kept in this browser.
"use strict";
{
  const ORDER = ["auto", "light", "dark"];

  const read = () => {
    try {
      return localStorage.getItem("anabranch-theme");
    } catch {
      return null; // a browser that keeps nothing
    }
  };

  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = theme[0].toUpperCase() + theme.slice(1);
      button.setAttribute("aria-label", `Colours: ${button.textContent}`);
    }
    document.dispatchEvent(new Event("themechange"));
  };

  apply(ORDER.includes(read()) ? read() : "auto");

  document.addEventListener("DOMContentLoaded", () => {
    const root = document.documentElement;
    apply(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const next = ORDER[(ORDER.indexOf(root.dataset.theme) + 1) % ORDER.length];
      try {
        localStorage.setItem("anabranch-theme", next);
      } catch {
        // then it holds until the page is left
      }
      apply(next);
    });
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    document.dispatchEvent(new Event("themechange")),
  );
}
