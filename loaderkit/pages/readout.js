// Moves the cursor of a chart with the pointer or the arrow keys, and says what is there.
// A chart becomes a slider: readers of screens pass the arrow keys on to it, and say the
// text of its value.  Without this script it is a picture with a caption.
for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.querySelector("script").textContent);
  const cursor = plot.querySelector(".cursor");
  const output = plot.parentElement.querySelector("output");
  let index = data.first;

  const show = (next) => {
    index = Math.min(Math.max(next, 0), data.at.length - 1);
    cursor.style.left = 100 * data.at[index] + "%";
    output.textContent = data.says[index];
    plot.setAttribute("aria-valuenow", index);
    plot.setAttribute("aria-valuetext", data.says[index]);
  };
  plot.tabIndex = 0;
  plot.setAttribute("role", "slider");
  plot.removeAttribute("aria-roledescription");
  plot.setAttribute("aria-valuemin", 0);
  plot.setAttribute("aria-valuemax", data.at.length - 1);
  show(index);

  const follow = (event) => {
    const box = plot.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    let nearest = 0;
    for (let i = 1; i < data.at.length; i++) {
      if (Math.abs(data.at[i] - share) < Math.abs(data.at[nearest] - share)) nearest = i;
    }
    show(nearest);
  };
  plot.addEventListener("pointermove", follow);
  // A finger that taps does not move.
  plot.addEventListener("pointerdown", follow);

  plot.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.round(data.at.length / 20));
    const next = {
      ArrowLeft: index - 1, ArrowRight: index + 1,
      PageUp: index - page, PageDown: index + page,
      Home: 0, End: data.at.length - 1, Escape: data.first,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    show(next);
  });
}
