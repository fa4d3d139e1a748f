// Starts the page: views, theme, key.

import { askForKey } from "./api.js";
import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { EngineView } from "./engine.js";

const THEMES = ["auto", "light", "dark"];

const engine = new EngineView();

function showView(name) {
  for (const view of ["chat", "engine"]) {
    const tab = byId(`${view}-tab`);
    tab.setAttribute("aria-selected", String(view === name));
    tab.tabIndex = view === name ? 0 : -1;
    byId(view).hidden = view !== name;
  }
  watchIfSeen();
}

/** The engine is watched only while somebody can see it. */
function watchIfSeen() {
  if (byId("engine").hidden || document.hidden) engine.stop();
  else engine.start();
}

function startTabs() {
  const tabs = [byId("chat-tab"), byId("engine-tab")];
  const open = (tab) => {
    history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
    showView(tab.getAttribute("aria-controls"));
  };
  tabs.forEach((tab, index) => {
    tab.onclick = () => open(tab);
    tab.onkeydown = (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = tabs[1 - index];
      other.focus();
      open(other);
    };
  });
  document.addEventListener("visibilitychange", watchIfSeen);
  showView(location.hash === "#engine" ? "engine" : "chat");
}

function startTheme() {
  const button = byId("theme-button");
  const use = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    engine.redraw();
  };
  let theme = localStorage.getItem("streamllm-theme");
  if (!THEMES.includes(theme)) theme = "auto";
  button.onclick = () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem("streamllm-theme", theme);
    use(theme);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.redraw());
  use(theme);
}

startTheme();
startTabs();
byId("key-button").onclick = () => askForKey(false);
startChat();
