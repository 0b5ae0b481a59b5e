// Readouts under the pointer. The page is complete without this script; it adds the values behind the curves.
'use strict';
for (const figure of document.querySelectorAll('figure.chart')) {
  const source = figure.querySelector('script');
  const area = figure.querySelector('.area');
  if (!source || !area) continue;
  const chart = JSON.parse(source.textContent);
  const add = (parent, tag, name) => {
    const element = document.createElement(tag);
    element.className = name;
    parent.append(element);
    return element;
  };
  const cursor = add(area, 'div', 'cursor');
  const dots = chart.stacked ? [] : chart.series.map(series => add(area, 'i', `spot c${series.colour}`));
  const readout = add(area, 'div', 'readout');
  cursor.hidden = readout.hidden = true;

  const left = x => (x - chart.x[0]) / (chart.x[1] - chart.x[0]);
  const height = y => chart.log
    ? Math.log(y / chart.y[0]) / Math.log(chart.y[1] / chart.y[0])
    : (y - chart.y[0]) / (chart.y[1] - chart.y[0]);
  const show = value => Math.abs(value) >= 1e-3 || value === 0
    ? value.toLocaleString('en', { maximumSignificantDigits: 4 })
    : value.toExponential(2);

  // The index of the point nearest to x: halve, then look at both neighbours.
  const nearest = (xs, x) => {
    let [low, high] = [0, xs.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  };

  const row = (name, value, colour) => {
    const line = add(readout, 'div', 'row');
    add(line, 'i', `key band c${colour}`);
    add(line, 'span', '').textContent = name;
    add(line, 'b', '').textContent = value;
  };

  const move = event => {
    const box = area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const x = chart.x[0] + share * (chart.x[1] - chart.x[0]);
    const at = chart.series[0].x[nearest(chart.series[0].x, x)];
    readout.replaceChildren();
    add(readout, 'div', 'where').textContent = `step ${Math.round(at).toLocaleString('en')}`;
    let total = 0;
    chart.series.forEach((series, index) => {
      const point = nearest(series.x, at);
      const y = series.y[point];
      total += y ?? 0;
      row(series.name, y === null ? 'not a number' : show(y), series.colour);
      if (!dots[index]) return;
      dots[index].hidden = y === null;
      dots[index].style.left = `${left(series.x[point]) * 100}%`;
      dots[index].style.bottom = `${height(y) * 100}%`;
    });
    if (chart.stacked) row('sum', show(total), 0);
    cursor.style.left = `${left(at) * 100}%`;
    readout.style.left = left(at) < 0.5 ? `calc(${left(at) * 100}% + 12px)` : 'auto';
    readout.style.right = left(at) < 0.5 ? 'auto' : `calc(${(1 - left(at)) * 100}% + 12px)`;
    cursor.hidden = readout.hidden = false;
  };
  const leave = () => {
    cursor.hidden = readout.hidden = true;
    for (const dot of dots) dot.hidden = true;
  };
  leave();
  area.addEventListener('pointermove', move);
  area.addEventListener('pointerdown', move);
  area.addEventListener('pointerleave', leave);
}
