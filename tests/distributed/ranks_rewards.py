def length_parity(response, answer, problem):
    return float(len(response) % 2)
