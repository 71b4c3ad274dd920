// Puts the parts into the page. data-ready and data-error on the root say how that went, for whoever checks.
window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
drawCharts(document.getElementById("charts"), payload.charts, payload.resumes);
const browserPlace = document.getElementById("rollouts");
if (browserPlace && payload.rollouts.steps.length) new Browser(browserPlace, payload.rollouts);
const findSetting = document.getElementById("find-setting");
findSetting?.addEventListener("input", () => {
  for (const row of document.querySelectorAll("#setting-rows tbody tr")) {
    row.classList.toggle("hidden", !row.textContent.toLowerCase().includes(findSetting.value.toLowerCase()));
  }
});
document.documentElement.dataset.ready = "yes";
if (location.hash.includes("=")) browserPlace?.scrollIntoView();
