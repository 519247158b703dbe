// Before anything is painted: the theme that was chosen last time, if the browser keeps it.
try {
  const theme = localStorage.getItem("stepspec-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // A page from the disk may not be allowed to keep anything.
}
document.documentElement.classList.add("scripted");
