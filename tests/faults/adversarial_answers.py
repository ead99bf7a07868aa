# ruff: noqa: RUF001 (digits of other scripts are the point)
"""Two hundred answers that hang, crash, exhaust or fool a naive verifier, by family. None equals GOLD."""

from __future__ import annotations

GOLD = "-31337.5"
MEGABYTE = 1 << 20


def nested(opening: str, closing: str, depth: int, core: str = "1") -> str:
    return opening * depth + core + closing * depth


def boxed(text: str) -> str:
    return rf"Therefore \boxed{{{text}}}"


def filled(piece: str) -> str:
    return piece * (MEGABYTE // len(piece))


def families(mark: str) -> dict[str, list[str]]:
    """``mark`` is a path that an answer which got itself evaluated would make."""
    inject = f"__import__('os').mkdir('{mark}')"
    return {
        "towers": [boxed(nested(f"{b}^{{", "}", d, b)) for b in ("9", "99", "1.1", "0.5", "(-3)", "x") for d in (2, 3, 8)]
        + [boxed(t) for t in (r"e^{e^{e^{e^{9}}}}", r"\pi^{\pi^{\pi^{\pi^{9}}}}", r"i^{i^{i^{10^{10}}}}", r"10^{-10^{10}}",
                              r"2^{2^{100}} \bmod 7", r"7^{-10^{11}}", r"1.0^{10^{18}}+2.5^{10^{15}}")],
        "factorials": [boxed(rf"(10^{{{k}}})!") for k in range(4, 14)]
        + [boxed(nested("(", ")!", d, "9")) for d in (2, 3, 4, 10, 100)]
        + [boxed(rf"\binom{{10^{{{k}}}}}{{5\cdot 10^{{{k - 1}}}}}") for k in (5, 7, 9, 12)]
        + [boxed(r"\gcd((10^8)!,(10^8)!+1)"), boxed(r"\Gamma(10^{10})"), boxed("9" + "!" * 300)],
        "nested fractions": [boxed(nested(rf"\{kind}{{1}}{{", "}", d, "2")) for kind in ("frac", "dfrac", "cfrac")
                             for d in (20, 100, 400)]
        + [boxed(nested(r"\frac{", "}{3}", d, "2")) for d in (20, 100, 400)] + [boxed(nested(r"1+\frac{1}{1+", "}", 150))],
        "deep nesting": [boxed(nested(o, c, d)) for o, c in (("(", ")"), (r"\left(", r"\right)"), (r"\sqrt{", "}"),
                         ("{", "}"), ("-(", ")"), (r"\text{", "}"), (r"\begin{pmatrix}", r"\end{pmatrix}")) for d in (30, 250)]
        + ["(" * 3000, ")" * 4000, nested("(", ")", 3000)],
        "a megabyte": [filled(p) for p in ("a", "9", "(", r"\boxed{", "$", " ", "\n", "9^", r"\frac{1}{", "{}", "\x00", "é",
                                           "\U0001d7d9", "\u202e", r"\boxed{2}", "#### ", "answer is ")]
        + [filled(p) + r" \boxed{2}" for p in ("a", "9,", "\\", "}", r"\boxed{")],
        "long answers": [boxed(p * (4000 // len(p))) for p in ("9", "x+", "x^", "1,", "-", "0.3", "x_", r"\cdot ", "1/", "=")],
        "control characters": [boxed(f"1{chr(c)}2") for c in (*range(0, 32, 2), 127, 0x85, 0xA0)]
        + [boxed(f"1{c}2") for c in ("\u200b", "\u202e", "\u2066", "\ufeff", "\ud800", "\ufffe", "\U000e0001")],
        "boxes": [nested(r"\boxed{", "}", d) for d in (2, 10, 500)] + [r"\boxed{" * d for d in (1, 10, 500)]
        + [r"\boxed{1", r"\boxed{}}}}", r"\boxed", r"\boxed{\boxed{\boxed{}}}", r"\boxed{1}\boxed{" * 200, r"\boxed{\}", r"\boxed {1}}{",
           r"}\boxed{{1}", r"\fbox{\boxed{1}", r"\boxed{1} or " * 300, r"\boxed{1} and \boxed{2"],
        "unicode digits": [boxed(t) for t in ("٣١٣٣٧", "३१३३७", "３１３３７", "𝟑𝟏𝟑𝟑𝟕", "³¹³³⁷", "①③③⑦", "Ⅻ", "三万", "½½", "𐒣", "৪৯", "๓๑", "−31337", "3̲1",
                                               "०.५", "٫٥")],
        "calculus": [boxed(t) for t in (r"\sum_{n=1}^{10^{12}} n^{n}", r"\prod_{n=1}^{10^{9}} n", r"\int_0^1 x^{x^{x^x}} \sin(e^{x^x}) dx",
                     r"\lim_{x \to 0} \frac{\sin(\tan x)-\tan(\sin x)}{\arcsin(\arctan x)-\arctan(\arcsin x)}",
                     r"(x+y+z+w)^{1000}-(x+y+z+w)^{999}", r"\sqrt{10^{10^{10}}}", r"\log_2 {9^{9^{9^9}}}", r"\sum_{k=0}^{\infty} k!",
                     r"\frac{d^{500}}{dx^{500}} \tan x", r"x^{500}+x^{499}+1=0")],
        "numbers": ["1e999999999", "-1e-999999999", boxed("1e999999999"), "#### 1e99999999", "#### " + "9" * 5000, "1/" + "9" * 5000,
                    "1" + "0" * 4999 + "e5000", boxed("0x" + "f" * 3000), "1" + "_0" * 1000, "1" + ",000" * 1000],
        "code": [boxed(inject), inject, f"```python\n{inject}\n```", boxed(rf"\text{{{inject}}}"), f"${inject}$",
                 f"answer: lambda: {inject}", boxed(f"exec({inject!r})"), boxed("Integer(5).__class__.__mro__"), "{{7*7}}", "%n%s%x" * 50,
                 "'; DROP TABLE answers; --", "<script>alert(1)</script>"],
    }  # fmt: skip
