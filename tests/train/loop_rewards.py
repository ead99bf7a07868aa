"""Rewards for small runs. A worker imports this file alone; a test file would bring torch along, for seconds."""


def length_parity(response, answer, problem):
    return float(len(response) % 2)


def always_wrong(response, answer, problem):
    return 0.0


def always_right(response, answer, problem):
    return 1.0


def ends_in_a_digit(response, answer, problem):
    return float(response[-1:].isdigit())


def always_raises(response, answer, problem):
    return problem.meta["verdict"]


def raises_on_odd_lengths(response, answer, problem):
    return 1 / (1 - len(response) % 2)


def half_of_parity(response, answer, problem):
    return 0.5 * (len(response) % 2)


def loss_of_parity(response, answer, problem):
    return len(response) % 2 - 1.0
