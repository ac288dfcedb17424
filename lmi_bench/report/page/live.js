"use strict";
// Follows a running sweep: asks for its state and, when a level has ended, changes what differs in
// the page. Scroll position, open details, choices, zooms and the focus stay.
(() => {
  const EVERY_MS = 500;
  const kept = ["open", "data-wide", "data-opened"]; // attributes that belong to the reader's view
  const leaf = (node) => node.matches?.(".chart, select, #live") ?? false;
  const name = (node) => node.id || node.getAttribute?.("aria-labelledby");
  const alike = (old, fresh) =>
    name(old) === name(fresh) &&
    old.nodeName === fresh.nodeName &&
    (name(old) || old.className === fresh.className);
  let shown = -1; // whatever was served first may be a level behind
  let failures = 0;

  const change = (old, fresh) => {
    if (leaf(old) || old.isEqualNode(fresh)) {
      return;
    }
    if (old.nodeType !== Node.ELEMENT_NODE) {
      old.data = fresh.data;
      return;
    }
    for (const each of [...old.attributes]) {
      if (!fresh.hasAttribute(each.name) && !kept.includes(each.name)) {
        old.removeAttribute(each.name);
      }
    }
    for (const each of fresh.attributes) {
      old.setAttribute(each.name, each.value);
    }
    let at = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      let match = at;
      while (match && name(child) && !alike(match, child)) {
        match = match.nextSibling; // only what has a name is looked for
      }
      if (!match || !alike(match, child)) {
        old.insertBefore(document.adoptNode(child), at);
        continue;
      }
      while (at !== match) {
        [at] = [at.nextSibling, at.remove()];
      }
      at = match.nextSibling;
      change(match, child);
    }
    while (at) {
      [at] = [at.nextSibling, at.remove()];
    }
  };

  const text = ({ revision, ended, text: level, done, total, since }) => {
    if (ended) {
      return "The sweep is over. This is the report.html of its run folder.";
    }
    const count = total === null ? `${done} requests` : `${done} of ${total}`;
    const what = level ? `${level}: ${count}, since ${since}` : "The first level is prepared.";
    return revision ? what : "The sweep opens its target.";
  };

  const refresh = async () => {
    const page = await (await fetch("/")).text();
    const fresh = new DOMParser().parseFromString(page, "text/html");
    // Not the rest: the charts keep elements of their own in the head and at the end.
    for (const part of ["header.top", "nav", "main", "#figures", "footer"]) {
      change(document.querySelector(part), fresh.querySelector(part));
    }
    window.lmi.show();
  };

  const follow = async () => {
    let state = null;
    try {
      state = await (await fetch("/state")).json();
      if (state.revision !== shown) {
        await refresh();
      }
      shown = state.revision;
      failures = 0;
    } catch {
      failures += 1;
    }
    const line = document.getElementById("live");
    line.textContent = state ? text(state) : "No answer from the sweep: this is its last state.";
    if (!state?.ended && failures < 20) {
      window.setTimeout(follow, EVERY_MS);
    }
  };
  follow();
})();
