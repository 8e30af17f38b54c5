// Exponentials of vectors, the same in every set but for where multiplications and additions are
// rounded together.
#pragma once

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers

// exp(r) * 2^power for r within half of log(2); `power` is a whole number that kMagic was added to.
ESS_LANE Floats exponential_near(Floats r, Floats power) {
    Floats sum = all(1.9875691500e-4f);
    sum = multiply_add(sum, r, all(1.3981999507e-3f));
    sum = multiply_add(sum, r, all(8.3334519073e-3f));
    sum = multiply_add(sum, r, all(4.1665795894e-2f));
    sum = multiply_add(sum, r, all(1.6666665459e-1f));
    sum = multiply_add(sum, r, all(5.0000001201e-1f));
    sum = multiply_add(sum, r * r, r) + 1.0f;
    const Ints exponent = ((Ints)power - (Ints)all(kMagic)) << 23;
    return sum * (Floats)(exponent + (Ints)all(1.0f));
}

// exp(x) for x <= 0, within a unit in the last place; 0 below -87, NaN for NaN.
ESS_LANE Floats exponential(Floats x) {
    const Floats low = all(-87.0f);
    const Ints tiny = x < low;
    x = tiny ? low : x;
    const Floats power = multiply_add(x, all(1.44269504f), all(kMagic)), whole = power - kMagic;
    Floats r = multiply_add(whole, all(-0.693359375f), x);
    r = multiply_add(whole, all(2.12194440e-4f), r);
    return tiny ? Floats{} : exponential_near(r, power);
}

// 2^x for x <= 0, as near; 0 below -126, NaN for NaN.
ESS_LANE Floats power_of_two(Floats x) {
    const Floats low = all(-126.0f);
    const Ints tiny = x < low;
    x = tiny ? low : x;
    const Floats power = x + kMagic;
    const Floats r = (x - (power - kMagic)) * 0.693147181f;
    return tiny ? Floats{} : exponential_near(r, power);
}

// The least whole number that is not below x; beyond 2^22, where kMagic does not round, x itself.
ESS_LANE Floats whole_from(Floats x) {
    const Floats magnitude = x < 0.0f ? -x : x;
    const Floats whole = magnitude < 4194304.0f ? (x + kMagic) - kMagic : x;
    return whole < x ? whole + 1.0f : whole;
}
