"""Makes the golden numbers of crates/parallel/src/agree/center/tests/expected.txt: where workers come to on functions
c(x - m)^2 / 2 by the rules of the papers, one update after the other.

python3 tools/agreements.py > crates/parallel/src/agree/center/tests/expected.txt

Only Python's floats; it knows nothing of the program that it checks. A line is a method, its numbers, the order in
which workers make their steps, and the weights of each worker after all of them.

easgd      Zhang, Choromanska, LeCun (2015), algorithm 1: if t > 0 and tau | t: x_i -= a(x - c), c += a(x - c), with x the
           value before; then x_i -= eta * g(x)
easgd-sync the same paper, equation (5): x_i -= eta * g(x_i) + a(x_i - c), c += a * sum(x_i - c), all of the old values
downpour   Dean et al. (2012), algorithm 7.1, with a fetch that is there behind the step before which it was asked for,
           and r times the pushed change added; what is not pushed stays the worker's
seasgd     ShmCaffe: read Wg; d = a(Wx - Wg); write d; then, at any later time, Wg += d; meanwhile Wx -= eta * g(Wx) and
           Wx -= d. The order says what happens: 0i worker i reads, 1i its d is added to Wg, 2i its step and Wx -= d. Wg is
           the last line of weights
dogwild    Noel, Osindero (2014): differences stream to the master, which answers with itself; one piece of the weights
           beside each step but the first, r times the difference added
"""

RATE = 0.1
FUNCTIONS = [(1.0, 2.0), (3.0, -1.0), (0.5, 4.0)]
ORDER = [0, 0, 0, 1, 0, 2, 0, 1, 0, 1, 2, 1, 1, 1, 0, 2, 1, 1, 2, 2, 2, 0, 0, 1]
ELEMENTS = 4


def gradient(worker, x):
    curvature, minimum = FUNCTIONS[worker]
    return curvature * (x - minimum)


def start():
    return [0.5 + index for index in range(ELEMENTS)]


def easgd(tau, a):
    x, center, made = [start() for _ in FUNCTIONS], start(), [0, 0, 0]
    for i in ORDER:
        old = list(x[i])
        if made[i] > 0 and made[i] % tau == 0:
            x[i] = [v - a * (v - c) for v, c in zip(old, center)]
            center = [c + a * (v - c) for v, c in zip(old, center)]
        x[i] = [v - RATE * gradient(i, o) for v, o in zip(x[i], old)]
        made[i] += 1
    return x


def easgd_sync(a, rounds):
    x, center = [start() for _ in FUNCTIONS], start()
    for step in range(rounds):
        # Nobody is anywhere else before the first step.
        pull = [[a * (v - c) for v, c in zip(own, center)] for own in x]
        x = [[v - RATE * gradient(i, v) - p for v, p in zip(own, pull[i])] for i, own in enumerate(x)]
        center = [c + sum(p[index] for p in pull) for index, c in enumerate(center)]
    return x


SCHEDULE = [0, 20, 10, 0, 1, 2, 22, 12, 21, 11, 20, 10, 1, 0, 11, 21, 1, 11, 21, 20, 2, 22, 10, 12, 0, 10, 20]


def seasgd(a, schedule):
    x, center, increments = [start() for _ in FUNCTIONS], [0.25 * v for v in start()], [None] * len(FUNCTIONS)
    for event in schedule:
        what, i = divmod(event, 10)
        if what == 0:
            increments[i] = [a * (v - c) for v, c in zip(x[i], center)]
        elif what == 1:
            center = [c + d for c, d in zip(center, increments[i])]
        else:
            x[i] = [v - RATE * gradient(i, v) - d for v, d in zip(x[i], increments[i])]
    return x + [center]


def downpour(n_fetch, n_push, r):
    x, master, made = [start() for _ in FUNCTIONS], start(), [0, 0, 0]
    pending = [[0.0] * ELEMENTS for _ in FUNCTIONS]
    for i in ORDER:
        fetched = list(master) if made[i] % n_fetch == 0 else None
        change = [-RATE * gradient(i, v) for v in x[i]]
        pending[i] = [p + c for p, c in zip(pending[i], change)]
        x[i] = [v + c for v, c in zip(x[i], change)]
        if fetched is not None:
            x[i] = [f + p for f, p in zip(fetched, pending[i])]
        if made[i] % n_push == 0:
            master = [m + r * p for m, p in zip(master, pending[i])]
            pending[i] = [0.0] * ELEMENTS
        made[i] += 1
    return x


def dogwild(pieces, r):
    x, master, made = [start() for _ in FUNCTIONS], start(), [0, 0, 0]
    known = [start() for _ in FUNCTIONS]
    for i in ORDER:
        before = list(x[i])
        x[i] = [v - RATE * gradient(i, v) for v in x[i]]
        for index in range(ELEMENTS):
            # Equal pieces, as far as they divide.
            if made[i] > 0 and index * pieces // ELEMENTS == (made[i] - 1) % pieces:
                master[index] += r * (before[index] - known[i][index])
                x[i][index] += master[index] - before[index]
                known[i][index] = master[index]
        made[i] += 1
    return x


def tell(name, numbers, order, x):
    words = [name, ",".join(str(number) for number in numbers), ",".join(str(i) for i in order)]
    print(" ".join(words + [",".join(repr(v) for v in own) for own in x]))


if __name__ == "__main__":
    for tau, a in [(1, 0.3), (2, 0.45), (4, 0.1)]:
        tell("easgd", [tau, a], ORDER, easgd(tau, a))
    for a in [0.1, 0.3]:
        tell("easgd-sync", [a], [0, 1, 2] * 7, easgd_sync(a, 7))
    for n_fetch, n_push, r in [(1, 1, 1.0), (2, 3, 1.0), (3, 1, 0.25)]:
        tell("downpour", [n_fetch, n_push, r], ORDER, downpour(n_fetch, n_push, r))
    for pieces, r in [(1, 1.0), (2, 0.5), (4, 1.0)]:
        tell("dogwild", [pieces, r], ORDER, dogwild(pieces, r))
    for a in [0.3, 0.45]:
        tell("seasgd", [a], SCHEDULE, seasgd(a, SCHEDULE))
