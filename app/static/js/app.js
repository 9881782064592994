// What every page shares: ages that stay fresh, confirmation, keys, theme, live stream state.
(() => {
  "use strict";

  const UNITS = [[60, 1, "s"], [3600, 60, "min"], [86400, 3600, "h"], [Infinity, 86400, "d"]];

  function ageText(seconds) {
    if (seconds < 1) return "just now";
    const [, unit, name] = UNITS.find(([limit]) => seconds < limit);
    return `${Math.floor(seconds / unit)} ${name} ago`;
  }

  function refreshAges() {
    for (const time of document.querySelectorAll("time[data-age]")) {
      const text = ageText((Date.now() - Date.parse(time.dateTime)) / 1000);
      if (time.textContent !== text) time.textContent = text;
    }
  }
  setInterval(refreshAges, 1000);

  document.addEventListener("submit", (event) => {
    const question = event.target.dataset.confirm || event.submitter?.dataset.confirm;
    if (question && !window.confirm(question)) event.preventDefault();
  });

  // Keys: elements with data-key="[" are followed when that key is pressed outside a field; "/" focuses the search.
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, [contenteditable]")) return;
    if (event.key === "/") {
      const search = document.querySelector("input[type=search]");
      if (search) { event.preventDefault(); search.focus(); }
      return;
    }
    const link = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    if (link && link.getAttribute("href")) { event.preventDefault(); link.click(); }
  });

  // Filters apply when a choice changes; without this script their button does it.
  document.addEventListener("change", (event) => {
    if (event.target.matches("select[data-submit]")) event.target.form.requestSubmit();
  });

  for (const select of document.querySelectorAll("select[data-theme-choice]")) {
    select.value = localStorage.getItem("cohort-theme") || "system";
    select.addEventListener("change", () => {
      if (select.value === "system") {
        localStorage.removeItem("cohort-theme");
        delete document.documentElement.dataset.theme;
      } else {
        localStorage.setItem("cohort-theme", select.value);
        document.documentElement.dataset.theme = select.value;
      }
      document.dispatchEvent(new Event("cohort:theme"));
    });
  }

  // A log follows its end as long as the reader is at the end.
  const atEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < 30;
  function followLogs() {
    for (const log of document.querySelectorAll("pre.log[data-follow]")) {
      if (log.dataset.watched) continue;
      log.dataset.watched = "yes";
      log.scrollTop = log.scrollHeight;
      let end = true;
      log.addEventListener("scroll", () => { end = atEnd(log); });
      new MutationObserver(() => { if (end) log.scrollTop = log.scrollHeight; }).observe(log, { childList: true, subtree: true, characterData: true });
    }
  }
  followLogs();

  // What a reader has opened stays open when fresh content arrives.
  window.htmx?.registerExtension("keep-open", {
    htmx_before_morph_attr: (element, { attrName, newValue }) =>
      !(attrName === "open" && newValue === null && element.matches("details")),
  });

  // A hidden page asks for nothing.
  document.addEventListener("htmx:before:request", (event) => {
    if (document.hidden && event.detail.ctx.sourceElement.matches("[hx-trigger^='every']")) event.preventDefault();
  });

  // The page begins again when what it shows has become another thing: the next stage, the first step, a new attempt.
  document.addEventListener("restart", () => window.location.reload());

  // Say when the live stream is away, instead of showing stale figures as if they were fresh.
  const away = document.getElementById("stream-away");
  if (away) {
    document.addEventListener("htmx:sse:error", () => { away.hidden = false; });
    document.addEventListener("htmx:sse:after:connection", () => { away.hidden = true; });
    document.addEventListener("htmx:sse:close", () => { away.hidden = true; });
  }
})();
