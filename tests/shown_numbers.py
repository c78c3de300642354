"""What a report shows as numbers, and what its content says that they must be."""

import math

WALK = """
(root) => {
  const element = document.querySelector(root);
  const numbers = [...element.querySelectorAll('data.number')].filter((e) => e.checkVisibility())
    .map((e) => ({ text: e.textContent, value: e.getAttribute('value'), source: e.dataset.source,
      unit: e.dataset.unit }));
  const texts = [];
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!parent.closest('data.number, svg, select, .visually-hidden, .word, .word-name'))
      texts.push(walker.currentNode.data);
  }
  return { numbers, texts };
}
"""
THIN, MINUS = "\u202f", "\u2212"
SUPERSCRIPTS = {ord(a): b for a, b in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True)}


def at(content, path):
    for key in path.split("."):
        content = content[int(key)] if isinstance(content, list) else content[key]
    return content


def expected(content, source, state):
    """Return the number that a source names: a path, a count, or a sum."""
    if source == "sum of the view":
        return view_sum(content, state)
    if source == "number of the other classes":
        point = content["points"][state[0]]
        order = sorted(range(len(point["probabilities"])), key=lambda number: -point["probabilities"][number])
        return len(order) - len({*order[:12], *map(int, point["explanations"])})
    if source == "number of the other values":
        return len(content["points"][state[0]]["input"]["values"]) - 12
    kind, _, rest = source.rpartition(" of ") if " of " in source else ("", "", source)
    if kind == "number":
        return len(rest.split(" "))
    if kind == "count":
        return len(at(content, rest))
    if kind == "sum":
        values = [at(content, path) for path in rest.split(" ")]
        return sum(row[1] for row in values[0]) if isinstance(values[0], list) else sum(values)
    return at(content, source)


def view_of(content, state):
    point, target, layer, steps = state
    explanation = content["points"][point]["explanations"][str(target)]
    return explanation, explanation["views"][f"{layer}|{steps}"]


def view_sum(content, state):
    """Return the sum of a view's terms and of what the output was before them, added here one by one."""
    _, _, layer, steps = state
    explanation, view = view_of(content, state)
    start = 0
    if layer == "*":
        start = explanation["initial"] if steps == "*" else explanation["running"][int(steps)]
    terms = [row[1] for side in ("raised", "lowered") for row in view[side]]
    terms += [view["rest_raised"][1], view["rest_lowered"][1]]
    return start + sum(terms) + sum(view[name] for name in ("decay", "statistics", "unexplained", "rounding"))


def exact_text(content, quanta):
    """Return an integer number of quanta as it is shown with all digits."""
    digits = round(-math.log10(content["quantum"]))
    whole, decimals = divmod(abs(quanta), 10**digits)
    text = f"{decimals:0{digits}d}"
    groups = THIN.join(text[start : start + 3] for start in range(0, digits, 3))
    return f"{MINUS if quanta < 0 else ''}{whole}.{groups}"


def read(text):
    plain = text.replace(THIN, "").replace(MINUS, "-").replace("+", "").translate(SUPERSCRIPTS)
    percent = plain.endswith("%")
    if percent and plain[0] in "<>":
        return (0.0005, 0.0005) if plain[0] == "<" else (0.9995, 0.0005)
    plain = plain.removesuffix("%")
    mantissa, _, exponent = plain.partition("×10")
    decimals = len(mantissa.partition(".")[2])
    scale = 10.0 ** (int(exponent) if exponent else 0) / (100 if percent else 1)
    return float(mantissa) * scale, 0.5001 * 10**-decimals * scale


def without_names(content, text):
    """Return a text without the names of the report's things, which may hold digits of their own."""
    names = [*content["outputs"]["classes"], *content["layers"], *(point["name"] for point in content["points"])]
    for first, last in content["ranges"]:
        names += [f"steps {first}–{last - 1}", f"step {first}"]
    names += [sentence for point in content["points"] for name, _, sentence in point["scores"]]
    names += [name for point in content["points"] for name, _ in point["input"].get("values", [])]
    inputs = [*(point["input"] for point in content["points"]), *content["samples"]["shown"].values()]
    texts = [given["text"] for given in inputs if "text" in given]
    for name in sorted([*names, *texts, *(f"{text[:60]}…" for text in texts)], key=len, reverse=True):
        text = text.replace(name, "")
    return text


def go(page, fragment):
    page.goto(page.url.split("#")[0] + fragment)


def fragment_of(state):
    point, target, layer, steps = state
    chosen = [f"{name}={value}" for name, value in (("layer", layer), ("steps", steps)) if value != "*"]
    return "#" + "&".join([f"point={point}", f"class={target}", *chosen])


def shown_sum(page):
    element = page.locator("#sum [data-source='sum of the view']")
    return int(element.get_attribute("value")), element.inner_text()


def check_numbers(page, content, state):
    """Compare every number of the shown prediction with its source, find no other digit, and return the sources."""
    shown = page.evaluate(WALK, "#shown")
    for number in shown["numbers"]:
        value = expected(content, number["source"], state)
        assert float(number["value"]) == value, number
        read_value, half = read(number["text"])
        assert abs(read_value - value * (content["quantum"] if number["unit"] == "quantum" else 1)) <= half, number
    for text in shown["texts"]:
        assert not any(digit.isdigit() for digit in without_names(content, text)), text
    return {number["source"] for number in shown["numbers"]}
